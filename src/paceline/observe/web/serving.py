"""Serves the app: listens, prints the address, and stops on a signal."""

import logging
import socket
import sys
import threading
from pathlib import Path
from types import FrameType

import uvicorn
from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.config.errors import from_flags
from paceline.errors import PacelineError
from paceline.observe.web.app import build_app
from paceline.util.connections import BoundedProtocol, is_loopback

KEY_VARIABLE = "PACELINE_UI_KEY"
"""Variable that may hold the key instead of the command line, which other users of the machine can read."""


class UiOptions(Section):
    """A web app over one folder of runs."""

    runs: str = "runs"
    """Folder that holds run directories, or one run directory."""
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs a key."""
    port: int = Field(default=8200, ge=0, le=65535)
    """0 picks a free port."""
    key: str | None = Field(default=None, min_length=1, repr=False)
    """Key that a browser must give to see anything."""

    @model_validator(mode="after")
    def _guarded(self) -> "UiOptions":
        if not self.key and not is_loopback(self.host):
            raise ValueError(
                f"{self.host} can be reached from other machines: give a key (--api-key or {KEY_VARIABLE}), "
                "or listen on 127.0.0.1"
            )
        if not Path(self.runs).is_dir():
            raise ValueError(f"there is no folder {self.runs}: name the folder that holds your runs, such as runs")
        return self


def load_options(**flags: object) -> UiOptions:
    """The options from the command line's flags; those that are None have their defaults."""
    return from_flags(UiOptions, flags)


GRACE_SECONDS = 1
"""Live pages hold their connection open for ever; shutdown does not wait for them."""


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
        self.force_exit = self.should_exit  # a second signal does not wait for connections
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
