"""Encodes responses as JSON, and checks the key and origin of each request.

Untrusted text needs two defences: it goes in as text (the modules below `static/` see to that), and should a script
get in all the same, the headers tell the browser to run only ours and to contact no other host.
"""

import hashlib
import hmac
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

import orjson
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.util.connections import refusal_reason

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
OPEN_PATHS = ("/static/css/", "/static/icon.svg")
"""Paths that need no key: those of the page that asks for it."""


class FiniteJsonResponse(Response):
    """A value as JSON; what is not finite becomes null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def encode_json(content: Any) -> bytes:
    """A value as the page's JSON. Text that is no Unicode (a lone surrogate) is shown with replacement characters."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(content, default=str, option=options)
    except TypeError:
        return orjson.dumps(_sanitize(content), default=str, option=options)


def _sanitize(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {_sanitize(key) if isinstance(key, str) else key: _sanitize(item) for key, item in value.items()}
        case list() | tuple():
            return [_sanitize(item) for item in value]
        case int() if abs(value) >= 1 << 63:
            return float(value)
    return value


class UiGuard:
    """ASGI middleware that checks key and origin. Not a BaseHTTPMiddleware, which would buffer server-sent events."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._key = key
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
            # The same page without the key in its address, where a history or a screenshot would keep it. A path such
            # as //elsewhere would lead to another host.
            redirect = RedirectResponse(
                "/" + path.lstrip("/") + (f"?{urlencode(query, doseq=True)}" if query else ""), 303
            )
            redirect.set_cookie(COOKIE, self._proof, httponly=True, samesite="strict", max_age=30 * 86_400)
            return redirect
        if path.startswith("/api/"):
            return JSONResponse({"error": "the key is missing or wrong: open the page anew and give it"}, 401)
        return FileResponse(STATIC / "key.html", 401)


def _equal_secrets(received: str, expected: str) -> bool:
    return hmac.compare_digest(received.encode(), expected.encode())
