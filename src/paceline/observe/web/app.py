"""Builds the web app: the page, its modules, and one router for each group of routes. And serves it."""

import logging
import socket
import sys
import threading
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from pydantic import Field, model_validator
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse

from paceline.config.base import Section
from paceline.config.errors import from_flags
from paceline.errors import PacelineError
from paceline.observe.record import Gone
from paceline.observe.web.http import STATIC, UiGuard
from paceline.observe.web.replay.runner import ReplayRunner
from paceline.observe.web.routes import GROUPS
from paceline.observe.web.routes.compare import Comparisons
from paceline.observe.web.runs import Runs
from paceline.util.connections import BoundedProtocol, is_loopback

log = logging.getLogger("paceline.observe.web")


def build_app(folder: Path, key: str | None = None) -> FastAPI:
    """The app over a folder of runs, or over one run."""
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.runs = Runs(folder)
    app.state.comparisons, app.state.replays = Comparisons(), ReplayRunner()
    for group in GROUPS:
        app.include_router(group.router, prefix="/api")
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_api_route("/", _page, methods=["GET"], response_model=None)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Gone, _gone)
    app.add_exception_handler(PacelineError, _unreadable)
    app.add_exception_handler(RequestValidationError, _misasked)
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(UiGuard, key=key)
    return app


async def _page() -> Response:
    return FileResponse(STATIC / "index.html")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, detail = request.url.path, error.detail
    sentences = {
        "Not Found": f"there is no {path} here",
        "Method Not Allowed": f"{path} does not take {request.method}",
    }
    return JSONResponse({"error": sentences.get(detail, detail)}, error.status_code)


async def _gone(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 404)


async def _unreadable(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 409)


async def _misasked(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    detail = error.errors()[0]
    return JSONResponse({"error": f"`{detail['loc'][-1]}`: {detail['msg']}"}, 400)


async def _failed(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse({"error": f"the server failed: {type(error).__name__}; its log has the cause"}, 500)


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
    with _listen(options.host, options.port) as listener:
        host = f"[{options.host}]" if ":" in options.host else options.host
        ready = f"paceline: showing {options.runs} at http://{host}:{listener.getsockname()[1]}/"
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
        _Server(config, ready).run(sockets=[listener])
    print("paceline: stopped", file=sys.stderr)


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise PacelineError(
            f"cannot listen on {host} port {port}: {reason}; choose another --port, 0 picks one"
        ) from None
    return listener
