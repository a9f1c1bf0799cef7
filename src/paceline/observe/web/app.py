"""Builds the web app from the page and one router for each group of routes, guards it and serves it.

Untrusted text needs two defences: it goes in as text (the modules below `static/` see to that), and should a script
get in all the same, the headers tell the browser to run only ours and to contact no other host.
"""

import hashlib
import hmac
import logging
import re
import secrets
import sys
import threading
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs, urlencode

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from pydantic import Field, model_validator
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.config.base import Section
from paceline.errors import PacelineError
from paceline.observe.record import RolloutNotFound
from paceline.observe.web import compare, overview, replay, rollouts, tickets
from paceline.observe.web.bundle import bundle_page
from paceline.observe.web.runs import Runs
from paceline.util.connections import GracefulServer, is_loopback, listen, refusal_reason, server_config

log = logging.getLogger("paceline.observe.web")
ROUTE_MODULES = (overview, rollouts, tickets, replay, compare)
STATIC = Path(__file__).parent / "static"
COOKIE = "paceline_ui"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Modules of an older version must not meet those of a newer one.
    "Cache-Control": "no-cache",
}
COMPRESSION = 1
"""Of gzip: metrics of a long run are megabytes, and a higher level takes several times as long for a tenth less."""
OPEN_PATHS = ("/static/css/", "/static/icon.svg")
"""Paths that need no key: those of the page that asks for it."""


class UiGuard:
    """ASGI middleware that checks key and origin. Not a BaseHTTPMiddleware, which would buffer server-sent events."""

    def __init__(self, app: ASGIApp, key: str | None, root_path: str) -> None:
        self._app = app
        self._key, self._root_path = key, root_path
        # The cookie proves that the key was known without being the key.
        self._proof = hmac.new(key.encode(), b"paceline ui", hashlib.sha256).hexdigest() if key else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        path = scope["path"]
        if path.startswith(f"{self._root_path}/"):
            scope = {**scope, "path": path.removeprefix(self._root_path)}
        if self._root_path == path:  # the page's addresses are relative to it
            await RedirectResponse(f"{path}/", 307)(scope, receive, send_with_headers)
        else:
            await (self._refusal(scope) or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        path, request = scope["path"], Request(scope)
        if why := refusal_reason(scope["headers"], has_key=self._key is not None):
            return JSONResponse({"error": why}, 403)
        if self._key is None or path.startswith(OPEN_PATHS):
            return None
        bearer, cookie = request.headers.get("authorization", ""), request.cookies.get(COOKIE, "")
        if _equal_secrets(bearer, f"Bearer {self._key}") or _equal_secrets(cookie, self._proof):
            return None
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if _equal_secrets(query.pop("key", [""])[0], self._key):
            # The same page without the key in its address, where a history or a screenshot would keep it. The address
            # is relative, as is the cookie's path: a proxy may show the page below a path that we do not know.
            rest = f"?{urlencode(query, doseq=True)}" if query else ""
            redirect = RedirectResponse(f"./{path.rpartition('/')[2]}{rest}", 303)
            redirect.set_cookie(COOKIE, self._proof, httponly=True, samesite="strict", max_age=30 * 86_400, path=None)
            return redirect
        if path.startswith("/api/"):
            return JSONResponse({"error": "the key is missing or wrong: open the page anew and give it"}, 401)
        return FileResponse(STATIC / "key.html", 401)


def _equal_secrets(received: str, expected: str) -> bool:
    return hmac.compare_digest(received.encode(), expected.encode())


class CompressedResponses(GZipMiddleware):
    """Compresses all answers but live events, which must not wait for one another."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_live = scope["type"] == "http" and scope["path"].endswith("/api/live")
        await (self.app if is_live else super().__call__)(scope, receive, send)


def build_app(folder: Path, key: str | None = None, root_path: str = "") -> FastAPI:
    """The app over a folder of runs, or one run. A proxy shows it below `root_path`, which it may take off or not."""
    app = FastAPI(
        title="Paceline",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.runs = Runs(folder)
    app.state.packed_metrics = overview.PackedMetrics()
    app.state.comparisons, app.state.replays = compare.ComparisonJobs(), replay.ReplayRunner()
    for group in ROUTE_MODULES:
        app.include_router(group.router, prefix="/api")
    page, files = bundle_page(STATIC / "index.html")
    for name, text in files.items():
        app.add_api_route(f"/static/{name}", partial(_bundle, name, text), methods=["GET"], response_model=None)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_api_route("/", lambda: HTMLResponse(page), methods=["GET"], response_model=None)
    for kind in (HTTPException, RolloutNotFound, PacelineError, RequestValidationError, Exception):
        app.add_exception_handler(kind, _error_response)
    app.add_middleware(CompressedResponses, compresslevel=COMPRESSION)
    app.add_middleware(UiGuard, key=key, root_path=root_path)
    return app


def _bundle(name: str, text: str) -> Response:
    kind = "text/css" if name.endswith(".css") else "text/javascript"
    return Response(text, media_type=kind, headers={"Cache-Control": "private, max-age=31536000, immutable"})


async def _error_response(request: Request, error: Exception) -> Response:
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
    """Address to listen on; anything but loopback has a key, which is made where none is given."""
    port: int = Field(default=8200, ge=0, le=65535)
    """0 picks a free port."""
    key: str | None = Field(default=None, min_length=1, repr=False)
    """Key that a browser must give to see anything."""
    root_path: str = ""
    """Path below which a reverse proxy shows the app, such as /paceline."""

    @model_validator(mode="after")
    def _check_paths(self) -> "UiOptions":
        if not re.fullmatch(r"(/[\w.~-]+)*/?", self.root_path):
            raise ValueError(f"`{self.root_path}` is no root path: write it as /paceline")
        if not Path(self.runs).is_dir():
            raise ValueError(f"there is no folder {self.runs}: name the folder that holds your runs, such as runs")
        return self


def serve_ui(options: UiOptions) -> None:
    """Serve until a signal comes."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    try:
        listener = listen(options.host, options.port)
    except PacelineError as error:
        raise PacelineError(f"{error}; choose another --port, 0 picks one") from None
    with listener:
        host = f"[{options.host}]" if ":" in options.host else options.host
        root_path = options.root_path.rstrip("/")
        address = f"http://{host}:{listener.getsockname()[1]}{root_path}/"
        key = options.key
        if key is not None:
            address += " (the page asks for the key)"
        elif not is_loopback(options.host):
            key = secrets.token_urlsafe(18)
            address += f"?key={key}"
        ready = f"paceline: showing {options.runs} at {address}"
        app = build_app(Path(options.runs), key, root_path)
        threading.Thread(target=app.state.runs.read_ahead, name="reading ahead", daemon=True).start()
        config = server_config(app, grace=1)  # live pages never close their connection themselves
        GracefulServer(config, lambda: print(ready, flush=True)).run(sockets=[listener])
    print("paceline: stopped", file=sys.stderr)
