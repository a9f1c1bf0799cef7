"""Builds the web app from the page and one router for each group of routes, and serves it."""

import logging
import sys
import threading
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from pydantic import Field, model_validator
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse

from paceline.config.base import Section
from paceline.config.errors import options_from_flags
from paceline.errors import PacelineError
from paceline.observe.record import RolloutNotFound
from paceline.observe.web import compare, overview, replay, rollouts, tickets
from paceline.observe.web.http import STATIC, UiGuard
from paceline.observe.web.runs import Runs
from paceline.util.connections import GracefulServer, is_loopback, listen, server_config

log = logging.getLogger("paceline.observe.web")
ROUTE_MODULES = (overview, rollouts, tickets, replay, compare)
"""The modules of routes, each with a `router`."""


def build_app(folder: Path, key: str | None = None) -> FastAPI:
    """The app over a folder of runs, or over one run."""
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.runs = Runs(folder)
    app.state.comparisons, app.state.replays = compare.ComparisonJobs(), replay.ReplayRunner()
    for group in ROUTE_MODULES:
        app.include_router(group.router, prefix="/api")
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_api_route("/", _index_page, methods=["GET"], response_model=None)
    for kind in (HTTPException, RolloutNotFound, PacelineError, RequestValidationError, Exception):
        app.add_exception_handler(kind, _error_response)
    app.add_middleware(UiGuard, key=key)
    return app


async def _index_page() -> Response:
    return FileResponse(STATIC / "index.html")


async def _error_response(request: Request, error: Exception) -> Response:
    """The error as JSON with one sentence."""
    path = request.url.path
    match error:
        case HTTPException():
            sentences = {
                "Not Found": f"there is no {path} here",
                "Method Not Allowed": f"{path} does not take {request.method}",
            }
            status, sentence = error.status_code, sentences.get(error.detail, error.detail)
        case RolloutNotFound():
            status, sentence = 404, str(error)
        case PacelineError():
            status, sentence = 409, str(error)
        case RequestValidationError():
            detail = error.errors()[0]
            status, sentence = 400, f"`{detail['loc'][-1]}`: {detail['msg']}"
        case _:
            log.error("%s %s failed", request.method, path, exc_info=error)
            status, sentence = 500, f"the server failed: {type(error).__name__}; its log has the cause"
    return JSONResponse({"error": sentence}, status)


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
    def _check_access(self) -> "UiOptions":
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
    return options_from_flags(UiOptions, flags)


GRACE_SECONDS = 1
"""Seconds that shutdown waits: live pages never close their connection themselves."""


def serve_ui(options: UiOptions) -> None:
    """Serve until a signal comes."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    try:
        listener = listen(options.host, options.port)
    except PacelineError as error:
        raise PacelineError(f"{error}; choose another --port, 0 picks one") from None
    with listener:
        host = f"[{options.host}]" if ":" in options.host else options.host
        ready = f"paceline: showing {options.runs} at http://{host}:{listener.getsockname()[1]}/"
        if options.key:
            ready += " (the page asks for the key)"
        app = build_app(Path(options.runs), options.key)
        threading.Thread(target=app.state.runs.read_ahead, name="reading ahead", daemon=True).start()
        config = server_config(app, GRACE_SECONDS)
        GracefulServer(config, lambda: print(ready, flush=True)).run(sockets=[listener])
    print("paceline: stopped", file=sys.stderr)
