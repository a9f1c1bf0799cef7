"""Requests to servers over HTTP, and the client of the engine behind a running `paceline serve`."""

import asyncio
import base64
import dataclasses
import math
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import orjson

from paceline.clients.rpc import ControlCall, RemoteEngine, deliver_whole
from paceline.config.secret import redact
from paceline.engine.base import Completion, EngineLimits, EngineStats, GenerateRequest, Grammar, Listener
from paceline.errors import (
    DeltaBaseMismatch,
    EngineError,
    Mismatch,
    Overloaded,
    RequestError,
    UnknownModel,
    Unreachable,
)
from paceline.weights import tensors as libraries
from paceline.weights.transports import UPDATE_HEADER, WeightPath, WeightTransport, transport_for
from paceline.weights.update import Canary, ServedPolicy, WeightUpdate
from paceline.weights.weight_store import clone_update

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
STATUS_ERRORS: dict[int, type[EngineError]] = dict.fromkeys((400, 405, 413, 422), RequestError)
STATUS_ERRORS |= {404: UnknownModel, 429: Overloaded, 503: Overloaded}
"""Overload passes, a request that is refused stays refused."""
STATS_SECONDS = 1.0
"""Longest age of `busy_seconds` while responses arrive."""
SCORE_SEQUENCES = 256
SCORE_TOKENS = 128_000
"""Tokens in one request for scores, unless one sequence has more: a server bounds what a body may hold."""
STATS_FIELDS = frozenset(field.name for field in dataclasses.fields(EngineStats))


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


def finite_canary(update: WeightUpdate) -> Canary | None:
    """The update's canary, if it has one. JSON cannot say infinity, and no engine could be compared with it."""
    if update.canary is not None and not all(map(math.isfinite, update.canary.logprobs)):
        raise Mismatch(f"version {update.version} gives log probabilities that are not finite: its weights are broken")
    return update.canary


class HttpEngine(HttpConnection, RemoteEngine):
    """Speaks the `Engine` protocol over HTTP/1.1, one connection per request under way.

    Cancelling a call closes its connection, and the server then takes the request out of its engine. Adapters travel in
    the request, full weights by `path` (`transports.py`): as files in `folder`, if it is given, which both sides must
    see under the same path and the server must `--allow`; else as the body of a request. Fingerprint and canary go with
    them, and the server checks both.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        folder: Path | None = None,
        path: WeightPath = "auto",
        timeout: float = 3600.0,
    ) -> None:
        super().__init__(url, api_key, timeout)
        self._transport_args = path, folder
        self._stats_time = 0.0
        self._stats_task: asyncio.Task[EngineStats] | None = None

    def start(self) -> None:
        """Check that a server answers here, takes our key and has an engine that lives."""
        for path in ("/health", "/limits"):
            self.request_sync(path, seconds=CONNECT_SECONDS)

    def close(self) -> None:
        self._close_transport()
        super().close()

    async def aclose(self) -> None:
        self._close_transport()
        await super().aclose()

    async def generate(self, request: GenerateRequest, listener: Listener | None = None) -> Completion:
        completion = _completion((await self.post("/v1/completions", _completion_body(request)))["choices"][0])
        if time.monotonic() - self._stats_time > STATS_SECONDS and (
            self._stats_task is None or self._stats_task.done()
        ):
            self._stats_task = asyncio.ensure_future(self.stats())
            # A failure is raised by the next call.
            self._stats_task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return deliver_whole(completion, listener)

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, model: str = ""
    ) -> list[list[float]]:
        scores: list[list[float]] = []
        for batch in _score_batches(sequences):
            body = {"token_ids": batch, "temperature": temperature} | ({"model": model} if model else {})
            scores += (await self.post("/v1/score", body))["logprobs"]
        return scores

    async def load_weights(self, update: WeightUpdate) -> float:
        adapter = update.adapter
        head: dict[str, Any] = {"version": update.version}
        if update.expected is not None:
            head["fingerprint"] = update.expected
        if (canary := finite_canary(update)) is not None:
            head["canary"] = dataclasses.asdict(canary)
        if adapter is None:
            answer = await self._transport.send(self, head, await self.store_update(update))
        else:
            packed = await asyncio.to_thread(lambda: base64.b64encode(libraries.serialize(update.tensors)))
            head |= {"name": adapter.name} if adapter.name else {}
            answer = await self.post("/adapters/load", head | {"weights": packed.decode(), "scale": adapter.scale})
        await self.stats()
        return answer["pause_seconds"]

    async def policy(self) -> ServedPolicy:
        answer = await self.get("/policy")
        return ServedPolicy(answer["version"], answer["fingerprint"])

    async def limits(self) -> EngineLimits:
        answer = await self.get("/limits")
        return EngineLimits(answer["max_context"], answer["vocabulary"], answer["max_top_logprobs"], answer["adapters"])

    async def stats(self) -> EngineStats:
        self._stats_time = time.monotonic()
        answer = await self.get("/stats")
        stats = EngineStats(**{name: value for name, value in answer.items() if name in STATS_FIELDS})
        self._busy = stats.busy_seconds
        return stats

    async def _ask(self, what: ControlCall) -> Any:
        return await self.post(f"/{what}")

    async def store_update(self, update: WeightUpdate) -> WeightUpdate:
        """A copy of an update that can be sent again later, whatever the trainer has done to its tensors by then."""
        if update.adapter is not None:
            return clone_update(update)
        return await self._transport.store_update(update)

    @cached_property
    def _transport(self) -> WeightTransport:
        """Created when weights are first sent: most HTTP engines never receive any."""
        return transport_for(*self._transport_args)

    async def stream(self, path: str, head: dict[str, Any], size: int, pieces: AsyncIterator[bytes]) -> Any:
        """For the transport: POST raw bytes, with `head` as JSON in the header `Paceline-Update`."""
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        headers[UPDATE_HEADER] = orjson.dumps(head).decode("ascii")
        return await self._request("POST", path, content=pieces, headers=headers)

    def _close_transport(self) -> None:
        if self._stats_task is not None:
            self._stats_task.cancel()
        if "_transport" in self.__dict__:
            self._transport.close()

    def _decode_response(self, response: httpx.Response) -> Any:
        status = response.status_code
        try:
            answer = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            answer = None
        if status == 200 and answer is not None:
            return answer
        error = answer.get("error") if isinstance(answer, dict) else None
        if not isinstance(error, dict):
            # Nonsense in place of an answer says nothing of what became of the question, like no answer at all.
            kind = Unreachable if status == 200 or status >= 500 else EngineError
            raise kind(f"{response.url} answered {status}, but not as a Paceline server does")
        by_status = {429: Overloaded, **dict.fromkeys((400, 413, 415), RequestError)}.get(status, EngineError)
        raise ERROR_CODES.get(str(error.get("code")), by_status)(str(error.get("message")))


ERROR_CODES = {
    "weights_mismatch": Mismatch,
    "other_base": DeltaBaseMismatch,
    "model_not_found": UnknownModel,
    "shutting_down": Unreachable,
    "engine_unavailable": Unreachable,
    "update_refused": EngineError,
}
"""Error class by error code; other codes are mapped by HTTP status."""


def _score_batches(sequences: Sequence[Sequence[int]]) -> Iterator[list[list[int]]]:
    batch: list[list[int]] = []
    tokens = 0
    for ids in sequences:
        if batch and (tokens + len(ids) > SCORE_TOKENS or len(batch) == SCORE_SEQUENCES):
            yield batch
            batch, tokens = [], 0
        batch.append(list(ids))
        tokens += len(ids)
    if batch:
        yield batch


SAME_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "noise", "order")
"""Fields of a request that have the same name in the body."""


def _completion_body(request: GenerateRequest) -> dict[str, Any]:
    body: dict[str, Any] = {name: getattr(request, name) for name in SAME_FIELDS} | {
        "flat": True,
        "prompt": request.prompt_ids,
        "stop_token_ids": sorted(request.stop_token_ids),
        "ignore_eos": True,  # the request's own stop tokens are all there are
    }
    if request.model:
        body["model"] = request.model
    if request.top_logprobs:
        body["logprobs"] = request.top_logprobs
    return body | _grammar_fields(request.grammar)


def _grammar_fields(grammar: Grammar | None) -> dict[str, Any]:
    if grammar is None:
        return {}
    if grammar.kind == "regex":
        return {"regex": grammar.source}
    if grammar.kind == "json":
        return {"response_format": {"type": "json_object"}}
    try:
        schema = orjson.loads(grammar.source)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the JSON schema is not JSON: {error}") from error
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def _completion(choice: dict[str, Any]) -> Completion:
    top = choice.get("top_logprobs")
    return Completion(
        token_ids=choice["token_ids"],
        logprobs=choice["token_logprobs"],
        versions=choice["versions"],
        finish=choice["finish_reason"],
        log_z=choice.get("log_z"),
        top=[[(token, logprob) for token, logprob in place] for place in top] if top is not None else None,
        recomputed=choice["recomputed"],
        cached=choice["cached_tokens"],
        queued=choice.get("queued_seconds", 0.0),
        weights={int(version): mark for version, mark in choice.get("weights", {}).items()},
    )
