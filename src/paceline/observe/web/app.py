"""The application: the page, its modules, and one router for each group of routes."""

import logging
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse

from paceline.errors import PacelineError
from paceline.observe.web.answers import STATIC
from paceline.observe.web.diffing import Comparisons
from paceline.observe.web.guard import UiGuard
from paceline.observe.web.replay.runner import ReplayRunner
from paceline.observe.web.routes import GROUPS
from paceline.observe.web.runs import Runs

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
    app.add_exception_handler(PacelineError, _unreadable)
    app.add_exception_handler(RequestValidationError, _misasked)
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(UiGuard, key=key)
    return app


async def _page() -> Response:
    return FileResponse(STATIC / "index.html")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} does not take {request.method}"}
    plain = error.detail in ("Not Found", "Method Not Allowed")
    return JSONResponse({"error": told.get(error.status_code) if plain else error.detail}, error.status_code)


async def _unreadable(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 409)


async def _misasked(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    detail = error.errors()[0]
    return JSONResponse({"error": f"`{detail['loc'][-1]}`: {detail['msg']}"}, 400)


async def _failed(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse({"error": f"the server failed: {type(error).__name__}; its log has the cause"}, 500)
