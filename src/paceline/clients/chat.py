"""Asks an OpenAI-compatible endpoint for chat completions, within its limits and with retries."""

import asyncio
import time
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import httpx

from paceline.clients.http import CONNECT_SECONDS, HttpConnection
from paceline.config.filters import FailureHandling
from paceline.config.secret import redact
from paceline.errors import EngineError, Overloaded, RequestError, Unreachable
from paceline.util.deadlines import DeadlineError, wait_within

LONGEST_WISH = 120.0
"""Seconds that an endpoint may ask us to wait by `Retry-After`; longer ones are cut to it."""
PASSING = frozenset((408, 425, 429))
"""Refusals beside the 5xx that another try may not meet."""


class EndpointBusy(Overloaded):
    """The endpoint cannot answer now, and may have said after how many seconds it can."""

    def __init__(self, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.wait = wait


class ChatEndpoint(HttpConnection):
    """One address. What is set by `limit` holds for all who ask here."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        url = url.rstrip("/").removesuffix("/chat/completions")
        path = urlsplit(url).path.rstrip("/")
        super().__init__(url, api_key, env_proxies=True)
        # Some services have their routes under another path than `/v1`.
        self._prefix = "" if path and not path.endswith("/v1") else "/v1"
        self._concurrency, self._spacing = 1 << 30, 0.0
        self._slots: asyncio.Semaphore | None = None
        self._next_start = 0.0

    @property
    def address(self) -> str:
        """The same, however the address was written: with `/v1`, a slash or `/chat/completions` at its end."""
        return f"{self.name}{self._prefix}"

    def limit(self, concurrency: int, requests_per_minute: float | None) -> None:
        """Allow at most so many requests at once and in a minute; the smallest limits that were set count."""
        self._concurrency = min(self._concurrency, concurrency)
        if requests_per_minute is not None:
            self._spacing = max(self._spacing, 60.0 / requests_per_minute)

    async def check(self) -> None:
        """Raise an `EngineError` unless something answers here and takes our key."""
        try:
            await wait_within(CONNECT_SECONDS, f"an answer of {self.name}", self.get(f"{self._prefix}/models"))
        except DeadlineError as error:
            raise Unreachable(str(error)) from None
        except (EndpointBusy, RequestError):
            pass  # it lives; not every endpoint lists its models

    async def chat(self, body: dict[str, Any], seconds: float, retries: int) -> tuple[dict[str, Any], float]:
        """One choice as the endpoint gives it, and how many seconds its answer took. A request that fails in a way that
        may pass is sent again, `retries` times at most."""
        for failed in count(1):
            try:
                return await self._send(body, seconds)
            except (Overloaded, Unreachable, DeadlineError) as error:
                if failed > retries:
                    raise EngineError(f"{error} ({failed} tries)" if retries else str(error)) from None
                wish = error.wait if isinstance(error, EndpointBusy) else 0.0
            await asyncio.sleep(max(wish, FailureHandling.pause(failed)))
        raise AssertionError

    async def _send(self, body: dict[str, Any], seconds: float) -> tuple[dict[str, Any], float]:
        slots = self._slots = self._slots or asyncio.Semaphore(self._concurrency)
        async with slots:  # bounded: each request before it has a deadline
            if self._spacing:
                start = max(self._next_start, time.monotonic())
                self._next_start = start + self._spacing
                await asyncio.sleep(start - time.monotonic())
            began = time.monotonic()
            request = self.post(f"{self._prefix}/chat/completions", body)
            answer = await wait_within(seconds, f"an answer of {self.name}", request)
            took = time.monotonic() - began
        try:
            choice = answer["choices"][0]
            if isinstance(choice["message"], dict):
                return choice, took
        except (LookupError, TypeError):
            pass
        raise Unreachable(f"{self.name} answered 200, but without a message: {redact(str(answer), self._key)[:200]}")

    def _decode_response(self, response: httpx.Response) -> Any:
        try:
            answer = super()._decode_response(response)
        except EngineError as error:
            if response.status_code >= 500 or response.status_code in PASSING:
                raise EndpointBusy(str(error), _retry_after(response)) from None
            raise
        if not isinstance(answer, dict):
            raise Unreachable(f"{self.name} answered 200, but no JSON object: {redact(str(answer), self._key)[:200]}")
        return answer


def _retry_after(response: httpx.Response) -> float:
    """Seconds by the header `Retry-After`; 0 where it is absent or a date."""
    try:
        return min(LONGEST_WISH, max(0.0, float(response.headers.get("retry-after", 0))))
    except ValueError:
        return 0.0
