"""Checks the caller before any endpoint, and adds admission, timing and Prometheus counters."""

import asyncio
import hmac
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import fields

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.engine.base import EngineStats
from paceline.server.errors import error_response
from paceline.util.connections import refusal_reason

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
COUNTERS = {"steps", "tokens", "prompt_tokens", "cached_tokens", "preempted", "swaps", "pause_seconds", "busy_seconds"}


class Meter:
    """Counts answers and how long they took, by route; routes are few and fixed, so the counts stay small."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.open = 0
        self._buckets: dict[str, list[int]] = {}
        self._seconds: Counter[str] = Counter()

    def record(self, route: str, status: int, seconds: float) -> None:
        self.answers[route, status] += 1
        counts = self._buckets.setdefault(route, [0] * (len(LATENCY_BUCKETS) + 1))
        counts[bisect_left(LATENCY_BUCKETS, seconds)] += 1
        self._seconds[route] += seconds  # ty: ignore[invalid-assignment] - a Counter adds floats as well

    def prometheus_lines(self, stats: EngineStats) -> Iterator[str]:
        for field in fields(stats):
            counts = field.name in COUNTERS
            name = f"paceline_engine_{field.name}{'_total' if counts else ''}"
            yield f"# TYPE {name} {'counter' if counts else 'gauge'}"
            yield f"{name} {float(getattr(stats, field.name)):g}"
        yield "# TYPE paceline_http_open_requests gauge"
        yield f"paceline_http_open_requests {self.open}"
        yield "# TYPE paceline_http_requests_total counter"
        for (route, status), count in sorted(self.answers.items()):
            yield f'paceline_http_requests_total{{route="{route}",status="{status}"}} {count}'
        yield "# TYPE paceline_http_request_seconds histogram"
        for route, counts in sorted(self._buckets.items()):
            cumulative = 0
            for bound, count in zip((*LATENCY_BUCKETS, "+Inf"), counts, strict=True):
                cumulative += count
                yield f'paceline_http_request_seconds_bucket{{route="{route}",le="{bound}"}} {cumulative}'
            yield f'paceline_http_request_seconds_sum{{route="{route}"}} {self._seconds[route]:g}'
            yield f'paceline_http_request_seconds_count{{route="{route}"}} {cumulative}'


OPEN_PATHS = {"/health"}
"""Answered without a key, so that a load balancer needs none."""

REQUESTS_PER_TURN = 2
"""Requests that begin in one turn of the event loop."""


class RequestAdmission:
    """Lets a few requests begin in each turn of the event loop, in the order in which they came: hundreds that arrive
    together do not keep `/health`, and streams under way, from their turn."""

    def __init__(self) -> None:
        self._num_admitted = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._num_admitted:
            loop.call_soon(self._admit_waiting, loop)
        if self._num_admitted < REQUESTS_PER_TURN:
            self._num_admitted += 1
            return
        self._waiting.append(turn := loop.create_future())
        await turn  # bounded: by the requests that came before

    def _admit_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_admitted = 0
        while self._waiting and self._num_admitted < REQUESTS_PER_TURN:
            turn = self._waiting.popleft()
            if not turn.done():  # else its client has gone
                turn.set_result(None)
                self._num_admitted += 1
        if self._num_admitted:
            loop.call_soon(self._admit_waiting, loop)


class ServerGuard:
    """Plain ASGI, since a middleware that wraps bodies would stand between an endpoint and a client that leaves."""

    def __init__(
        self, app: ASGIApp, meter: Meter, routes: Collection[str], api_key: str | None, control: Collection[str] = ()
    ) -> None:
        """`control` are the paths that change what is served: they need the key even where nothing else does."""
        self._app, self._meter = app, meter
        self._routes, self._control = frozenset(routes), frozenset(control)
        self._expected_header = f"Bearer {api_key}".encode() if api_key else None
        self._admission = RequestAdmission()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0
        start = time.perf_counter()

        async def send_and_record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._meter.open += 1
        try:
            if scope["path"] not in OPEN_PATHS:
                await self._admission.wait()  # bounded: by the requests that came before
            await (self._refusal(scope) or self._app)(scope, receive, send_and_record)
        except asyncio.CancelledError:
            # Only a shutdown whose grace is over cancels a request. A client that still waits for a status gets one.
            if not status:
                await _SHUTTING_DOWN(scope, receive, send_and_record)
        finally:
            self._meter.open -= 1
            # Other paths share a label, or a scanner could fill the memory with them.
            route = scope["path"] if scope["path"] in self._routes else "other"
            self._meter.record(route, status, time.perf_counter() - start)

    def _refusal(self, scope: Scope) -> Response | None:
        if why := refusal_reason(scope["headers"], has_key=self._expected_header is not None):
            return error_response(403, why, code="foreign_caller")
        if self._expected_header is None:
            return _NEEDS_KEY if scope["path"] in self._control else None
        if scope["path"] in OPEN_PATHS:
            return None
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return None if hmac.compare_digest(given, self._expected_header) else _WRONG_KEY


_WRONG_KEY = error_response(
    401,
    "the API key is missing or wrong: send `Authorization: Bearer KEY`",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
_NEEDS_KEY = error_response(
    403,
    "weights, adapters, pause and sleep are for the holder of the server's key: start it with PACELINE_API_KEY or "
    "--api-key, and send `Authorization: Bearer KEY`",
    code="needs_api_key",
)
_SHUTTING_DOWN = error_response(503, "the server is shutting down", code="shutting_down")
