"""Base classes of engines behind a connection: control calls, and HTTP by one client per event loop."""

import asyncio
import math
import socket
from abc import ABC, abstractmethod
from typing import Any, Literal

import httpx
import orjson

from paceline.config.secret import redact
from paceline.engine.base import Completion, Listener, Piece
from paceline.errors import EngineError, Mismatch, Overloaded, RequestError, UnknownModel, Unreachable
from paceline.weights.update import Canary, WeightUpdate

CONNECT_SECONDS = 10.0
SYNC_SECONDS = 60.0
JSON_HEADERS = {"Content-Type": "application/json"}
KEEPALIVE_CONNECTIONS = 1024
KEEPALIVE_OPTIONS = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), seconds)
    for name, seconds in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]
"""A machine that vanished is noticed within half a minute, however long its requests take."""
BAD_REQUEST_STATUSES = (400, 405, 413, 422)
STATUS_ERRORS = {
    404: UnknownModel,
    429: Overloaded,
    503: Overloaded,
    **dict.fromkeys(BAD_REQUEST_STATUSES, RequestError),
}
"""Overload passes, a request that is refused stays refused."""
ControlCall = Literal["policy", "limits", "stats", "pause", "resume", "sleep", "wake"]


class RemoteEngine(ABC):
    """The calls of the `Engine` protocol that have no arguments and no result."""

    _busy = 0.0

    @abstractmethod
    async def _ask(self, what: ControlCall) -> Any: ...

    async def pause(self) -> None:
        await self._ask("pause")

    async def resume(self) -> None:
        await self._ask("resume")

    async def sleep(self) -> None:
        await self._ask("sleep")

    async def wake(self) -> None:
        await self._ask("wake")

    @property
    def busy_seconds(self) -> float:
        """As of the last answer that reported it."""
        return self._busy


def deliver_whole(completion: Completion, listener: Listener | None) -> Completion:
    """Pass a finished completion to the listener as one piece, for engines that do not stream; returns it."""
    if listener is not None:
        listener(Piece(completion.token_ids, completion.logprobs, completion.versions, completion.top))
    return completion


def finite_canary(update: WeightUpdate) -> Canary | None:
    """The update's canary, if it has one. JSON cannot say infinity, and no engine could be compared with it."""
    if update.canary is not None and not all(map(math.isfinite, update.canary.logprobs)):
        raise Mismatch(f"version {update.version} gives log probabilities that are not finite: its weights are broken")
    return update.canary


class HttpConnection:
    """Requests to one server, whose refusals are raised as our errors. Cancelling a request closes its connection, and
    the server then drops it."""

    def __init__(self, url: str, api_key: str | None, timeout: float = 3600.0, env_proxies: bool = False) -> None:
        self.name = url.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self._client_options: dict[str, Any] = {
            "base_url": self.name,
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            "trust_env": env_proxies,  # a proxy that the environment names must not get an engine's key
            "timeout": httpx.Timeout(timeout, connect=CONNECT_SECONDS, pool=None),
        }
        self._loop_client: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None

    async def get(self, path: str, **more: Any) -> Any:
        return await self._request("GET", path, **more)

    async def post(self, path: str, body: Any = None) -> Any:
        content = orjson.dumps(body) if body is not None else None
        return await self._request("POST", path, content=content, headers=JSON_HEADERS)

    def request_sync(self, path: str, body: Any = None, seconds: float = SYNC_SECONDS) -> Any:
        """A blocking GET, or POST with a body, outside an event loop."""
        quick: dict[str, Any] = {**self._client_options, "timeout": seconds}
        with httpx.Client(**quick) as client:
            try:
                return self._decode_response(client.get(path) if body is None else client.post(path, json=body))
            except httpx.TransportError as error:
                raise self._unreachable(error) from error

    def close(self) -> None:
        """Let the connections go. Inside an event loop, await `aclose` instead to see them closed."""
        opened, self._loop_client = self._loop_client, None
        if opened is not None and opened[0].is_running():
            loop, client = opened
            loop.call_soon_threadsafe(lambda: loop.create_task(client.aclose()))

    async def aclose(self) -> None:
        """Close every connection; what still runs is cancelled by the server."""
        opened, self._loop_client = self._loop_client, None
        if opened is not None:
            await opened[1].aclose()

    async def _request(self, method: str, path: str, **more: Any) -> Any:
        try:
            return self._decode_response(await self._client().request(method, path, **more))
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error

    def _client(self) -> httpx.AsyncClient:
        """One for each event loop: connections cannot move to another."""
        loop = asyncio.get_running_loop()
        if self._loop_client is None or self._loop_client[0] is not loop:
            transport = None  # with a transport of ours httpx would not look for proxies
            if not self._client_options["trust_env"]:
                limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEEPALIVE_CONNECTIONS)
                transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=KEEPALIVE_OPTIONS)
            self._loop_client = (loop, httpx.AsyncClient(**self._client_options, transport=transport))
        return self._loop_client[1]

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(f"{self.name} does not answer: {str(error) or type(error).__name__}")

    def _decode_response(self, response: httpx.Response) -> Any:
        """The answer of an OpenAI-compatible server, or its own sentence as the error it stands for."""
        try:
            answer = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            answer = response.text  # health, metrics and some orders answer in words, or not at all
        if response.status_code == 200:
            return answer
        message = answer.get("error", answer) if isinstance(answer, dict) else answer
        message = message.get("message", message) if isinstance(message, dict) else message
        where, words = str(response.url).partition("?")[0], redact(str(message), self._key)[:500]
        raise STATUS_ERRORS.get(response.status_code, EngineError)(f"{where} answered {response.status_code}: {words}")
