"""HTTP client for third-party engines: one client per event loop, refusals raised as our errors."""

import asyncio
from typing import Any

import httpx
import orjson

from paceline.config.secret import hidden
from paceline.errors import EngineError, Overloaded, RequestError, UnknownModel, Unreachable

CONNECT_SECONDS = 10.0
LOOK_SECONDS = 60.0
ORDER_SECONDS = 900.0
"""Longest order: all weights from a slow disk."""
JSON = {"Content-Type": "application/json"}
ALONE = {**JSON, "Connection": "close"}
"""Orders come seldom, and a server that fails one resets the connection, which the next must not find open."""


class EngineHttpClient:
    """Asks and orders. Cancelling an `ask` closes its connection, and the server then drops the request."""

    def __init__(self, url: str, api_key: str | None, timeout: float = 3600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self._settings: dict[str, Any] = {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            "trust_env": False,  # a proxy that the environment names must not get our key
            "timeout": httpx.Timeout(timeout, connect=CONNECT_SECONDS, pool=None),
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=1024),
        }
        self._open: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None

    async def ask(self, path: str, body: Any) -> Any:
        """A request for tokens, which may take as long as they do."""
        return await self._send("POST", path, content=orjson.dumps(body), headers=JSON)

    async def order(self, path: str, body: Any = None, **query: Any) -> Any:
        """A command to the server itself."""
        content = orjson.dumps(body) if body is not None else None
        return await self._send("POST", path, content=content, params=query, headers=ALONE, timeout=ORDER_SECONDS)

    async def get(self, path: str) -> Any:
        return await self._send("GET", path, timeout=CONNECT_SECONDS)

    def look(self, path: str, body: Any = None) -> Any:
        """A question outside an event loop."""
        quick: dict[str, Any] = {**self._settings, "timeout": LOOK_SECONDS}
        with httpx.Client(**quick) as client:
            try:
                return self._read(client.get(path) if body is None else client.post(path, json=body))
            except httpx.TransportError as error:
                raise self._unreachable(error) from error

    def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None and opened[0].is_running():
            loop, client = opened
            loop.call_soon_threadsafe(lambda: loop.create_task(client.aclose()))

    async def aclose(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            await opened[1].aclose()

    async def _send(self, method: str, path: str, **more: Any) -> Any:
        try:
            return self._read(await self._client().request(method, path, **more))
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def _client(self) -> httpx.AsyncClient:
        """One for each event loop: connections cannot move to another."""
        loop = asyncio.get_running_loop()
        if self._open is None or self._open[0] is not loop:
            self._open = (loop, httpx.AsyncClient(**self._settings))
        return self._open[1]

    def _unreachable(self, error: httpx.TransportError) -> Unreachable:
        return Unreachable(f"{self.url} does not answer: {str(error) or type(error).__name__}")

    def _read(self, response: httpx.Response) -> Any:
        try:
            answer = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            answer = response.text  # health, metrics and some orders answer in words, or not at all
        if response.status_code == 200:
            return answer
        told = answer.get("error", answer) if isinstance(answer, dict) else answer
        told = told.get("message", told) if isinstance(told, dict) else told
        words = hidden(str(told), self._key)[:500]
        raise _kind(response.status_code)(f"{self.url}{response.url.path} answered {response.status_code}: {words}")


def _kind(status: int) -> type[EngineError]:
    """The error class of an HTTP status: overload passes, a request that is refused stays refused."""
    if status == 404:
        return UnknownModel
    if status in (429, 503):
        return Overloaded
    return RequestError if status in (400, 405, 413, 422) else EngineError
