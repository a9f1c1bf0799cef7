"""The process around the app: listen, say where, and leave when told to."""

import logging
import socket
import sys
import threading
from pathlib import Path
from types import FrameType

import uvicorn

from paceline.connections import BoundedProtocol
from paceline.errors import PacelineError
from paceline.ui.app import build_app
from paceline.ui.options import UiOptions

GRACE_SECONDS = 1
"""Live pages hold their connection open for ever; nobody waits for them."""


class _Server(uvicorn.Server):
    """Uvicorn that says where it is once it answers, and that a signal ends without an error."""

    def __init__(self, config: uvicorn.Config, ready: str) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._ready, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # whoever asks twice waits for nobody
        self.should_exit = True


def serve_ui(options: UiOptions) -> None:
    """Serve until a signal comes."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    with _listen(options.host, options.port) as door:
        host = f"[{options.host}]" if ":" in options.host else options.host
        ready = f"paceline: showing {options.runs} at http://{host}:{door.getsockname()[1]}/"
        if options.key:
            ready += " (the page asks for the key)"
        app = build_app(Path(options.runs), options.key)
        threading.Thread(target=app.state.runs.read_ahead, name="reading ahead", daemon=True).start()
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        _Server(config, ready).run(sockets=[door])
    print("paceline: stopped", file=sys.stderr)


def _listen(host: str, port: int) -> socket.socket:
    door = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind((host, port))
    except OSError as error:
        door.close()
        reason = error.strerror or error
        raise PacelineError(
            f"cannot listen on {host} port {port}: {reason}; choose another --port, 0 picks one"
        ) from None
    return door
