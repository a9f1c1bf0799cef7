"""Before any endpoint: the API key. Around each: the clock and the counters."""

import asyncio
import hmac
import time
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.inference.server.errors import error_response
from paceline.inference.server.metrics import Meter

OPEN_PATHS = {"/health"}
"""Answered without a key, so that a load balancer needs none."""


class Guard:
    """Plain ASGI, since a middleware that wraps bodies would stand between an endpoint and a client that leaves."""

    def __init__(self, app: ASGIApp, meter: Meter, routes: Collection[str], api_key: str | None) -> None:
        self._app = app
        self._meter = meter
        self._routes = frozenset(routes)
        self._expected = f"Bearer {api_key}".encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0
        start = time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._meter.open += 1
        try:
            app = self._app if self._may_pass(scope) else _WRONG_KEY
            await app(scope, receive, watched)
        except asyncio.CancelledError:
            # Only a shutdown whose grace is over cancels a request. Whoever still waits for a status gets one.
            if not status:
                await _SHUTTING_DOWN(scope, receive, watched)
        finally:
            self._meter.open -= 1
            # Other paths share a label, or a scanner could fill the memory with them.
            route = scope["path"] if scope["path"] in self._routes else "other"
            self._meter.record(route, status, time.perf_counter() - start)

    def _may_pass(self, scope: Scope) -> bool:
        if self._expected is None or scope["path"] in OPEN_PATHS:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)


_WRONG_KEY = error_response(
    401,
    "the API key is missing or wrong: send `Authorization: Bearer KEY`",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
_SHUTTING_DOWN = error_response(503, "the server is shutting down", code="shutting_down")
