"""Guards a vLLM that Paceline started: calls need the key, and it ends with its parent process.

vLLM asks for its key at `/v1` and `/inference` only, which leaves the calls that replace weights to any user of the
machine. Lies in a folder of its own and imports nothing of Paceline, for vLLM has an environment of its own.
"""

import hmac
import os
import signal
import threading
import time
from typing import Any

OPEN = ("/health",)
LOOK_SECONDS = 2.0


class Guard:
    """ASGI middleware, given to vLLM by `--middleware`."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._wanted = b"Bearer " + os.environ["VLLM_API_KEY"].encode()
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                head = [(b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": 401, "headers": head})
                await send({"type": "http.response.body", "body": b'{"error": {"message": "the key is missing"}}'})
                return
        await self._app(scope, receive, send)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)  # unbounded: for as long as the server lives
    os.kill(os.getpid(), signal.SIGTERM)
