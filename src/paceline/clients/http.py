"""An engine behind a running `paceline serve`, used as if it were in this process."""

import asyncio
import base64
import dataclasses
import math
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson

from paceline.engine.base import Completion, EngineLimits, EngineStats, GenerateRequest, Grammar, Listener, Piece
from paceline.errors import EngineError, Mismatch, OtherBase, Overloaded, RequestError, UnknownModel, Unreachable
from paceline.weights import tensors as libraries
from paceline.weights.transports import UPDATE_HEADER, Carrier, WeightPath, carrier_for
from paceline.weights.update import ServedPolicy, WeightUpdate
from paceline.weights.weight_store import copied

CONNECT_SECONDS = 10.0
KEPT_CONNECTIONS = 1024
FRESH_SECONDS = 1.0
"""How old `busy_seconds` may grow while answers come in."""
SEQUENCES_AT_ONCE = 256
SCORED_AT_ONCE = 128_000
"""Tokens in one request for scores, unless one sequence has more: a server bounds what a body may hold."""
KEEP_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), seconds)
    for name, seconds in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]
"""A machine that vanished without a word is noticed within half a minute, however long its requests may take."""
STATS = frozenset(field.name for field in dataclasses.fields(EngineStats))


class HttpEngine:
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
        self.name = url.rstrip("/").removesuffix("/v1")
        self._travel = path, folder
        self._carries: Carrier | None = None
        self._settings: dict[str, Any] = {
            "base_url": self.name,
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            "trust_env": False,  # a proxy that the environment names must not get our key
            "timeout": httpx.Timeout(timeout, connect=CONNECT_SECONDS, pool=None),
        }
        self._open: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None
        self._busy = 0.0
        self._asked = 0.0
        self._asking: asyncio.Task[EngineStats] | None = None

    # -- the engine's protocol ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Check that a server answers at this address, takes our key and has an engine that lives."""
        quick: dict[str, Any] = {**self._settings, "timeout": CONNECT_SECONDS}
        with httpx.Client(**quick) as client:
            for path in ("/health", "/limits"):
                try:
                    _read(client.get(path))
                except httpx.TransportError as error:
                    raise self._unreachable(error) from error

    def close(self) -> None:
        """Let the connections go. Inside an event loop, await `aclose` instead to see them closed."""
        opened = self._leave()
        if opened is not None and opened[0].is_running():
            loop, client = opened
            loop.call_soon_threadsafe(lambda: loop.create_task(client.aclose()))

    async def aclose(self) -> None:
        """Close every connection; what still runs is cancelled by the server."""
        opened = self._leave()
        if opened is not None:
            await opened[1].aclose()

    async def generate(self, request: GenerateRequest, listener: Listener | None = None) -> Completion:
        """One completion. A listener hears it as one piece, when it is whole."""
        completion = _completion((await self._post("/v1/completions", _body(request)))["choices"][0])
        self._freshen()
        if listener is not None:
            listener(Piece(completion.token_ids, completion.logprobs, completion.versions, completion.top))
        return completion

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, model: str = ""
    ) -> list[list[float]]:
        scores: list[list[float]] = []
        for some in _portions(sequences):
            body = {"token_ids": some, "temperature": temperature} | ({"model": model} if model else {})
            scores += (await self._post("/v1/score", body))["logprobs"]
        return scores

    async def load_weights(self, update: WeightUpdate) -> float:
        adapter = update.adapter
        head: dict[str, Any] = {"version": update.version}
        if update.expected is not None:
            head["fingerprint"] = update.expected
        if update.canary is not None:
            head["canary"] = _canary(update)
        if adapter is None:
            answer = await self._carrier.send(self, head, await self.keep(update))
        else:
            weights = await asyncio.to_thread(_packed, update)
            head |= {"name": adapter.name} if adapter.name else {}
            answer = await self._post("/adapters/load", head | {"weights": weights, "scale": adapter.scale})
        await self.stats()
        return answer["pause_seconds"]

    async def policy(self) -> ServedPolicy:
        answer = await self._get("/policy")
        return ServedPolicy(answer["version"], answer["fingerprint"])

    async def limits(self) -> EngineLimits:
        answer = await self._get("/limits")
        return EngineLimits(answer["max_context"], answer["vocabulary"], answer["max_top_logprobs"], answer["adapters"])

    async def stats(self) -> EngineStats:
        self._asked = time.monotonic()
        answer = await self._get("/stats")
        stats = EngineStats(**{name: value for name, value in answer.items() if name in STATS})
        self._busy = stats.busy_seconds
        return stats

    async def pause(self) -> None:
        await self._post("/pause")

    async def resume(self) -> None:
        await self._post("/resume")

    async def sleep(self) -> None:
        await self._post("/sleep")

    async def wake(self) -> None:
        await self._post("/wake")

    @property
    def busy_seconds(self) -> float:
        """As of the last vital signs: asked for at every update, and every second while answers come in."""
        return self._busy

    async def keep(self, update: WeightUpdate) -> WeightUpdate:
        """A copy of an update that can be sent again later, whatever the trainer has done to its tensors by then."""
        if update.adapter is not None:
            return copied(update)
        return await self._carrier.keep(update)

    # -- the wire -----------------------------------------------------------------------------------------------------

    @property
    def _carrier(self) -> Carrier:
        """Made when weights first travel: most engines behind HTTP only answer."""
        if self._carries is None:
            self._carries = carrier_for(*self._travel)
        return self._carries

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """For the carrier: a request with JSON."""
        return await self._post(path, body)

    async def stream(self, path: str, head: dict[str, Any], size: int, pieces: AsyncIterator[bytes]) -> Any:
        """For the carrier: a request with raw bytes, the head in a header of its own."""
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        headers[UPDATE_HEADER] = orjson.dumps(head).decode("ascii")
        try:
            return _read(await self._client().post(path, content=pieces, headers=headers))
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    async def _get(self, path: str) -> Any:
        try:
            return _read(await self._client().get(path))
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    async def _post(self, path: str, body: Any = None) -> Any:
        content = orjson.dumps(body) if body is not None else None
        try:
            return _read(await self._client().post(path, content=content, headers=JSON))
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def _client(self) -> httpx.AsyncClient:
        """One for each event loop: connections cannot move to another."""
        loop = asyncio.get_running_loop()
        if self._open is None or self._open[0] is not loop:
            # Given a transport, httpx takes these from it alone.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS)
            transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=KEEP_ALIVE)
            self._open = (loop, httpx.AsyncClient(**self._settings, transport=transport))
        return self._open[1]

    def _leave(self) -> tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None:
        if self._asking is not None:
            self._asking.cancel()
        if self._carries is not None:
            self._carries.close()
        opened, self._open = self._open, None
        return opened

    def _freshen(self) -> None:
        if time.monotonic() - self._asked > FRESH_SECONDS and (self._asking is None or self._asking.done()):
            self._asking = asyncio.ensure_future(self.stats())
            self._asking.add_done_callback(_forgive)

    def _unreachable(self, error: httpx.TransportError) -> Unreachable:
        cause = str(error) or type(error).__name__
        return Unreachable(f"{self.name} does not answer: {cause}")


JSON = {"Content-Type": "application/json"}
MISMATCH = "weights_mismatch"
"""The code of a refusal because weights are not what they claim to be."""
OTHER_BASE = "other_base"
"""The code of a refusal because the engine does not hold what a delta builds on."""


def _portions(sequences: Sequence[Sequence[int]]) -> Iterator[list[list[int]]]:
    """The sequences in order, a request's worth at a time."""
    some: list[list[int]] = []
    tokens = 0
    for ids in sequences:
        if some and (tokens + len(ids) > SCORED_AT_ONCE or len(some) == SEQUENCES_AT_ONCE):
            yield some
            some, tokens = [], 0
        some.append(list(ids))
        tokens += len(ids)
    if some:
        yield some


def _body(request: GenerateRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "flat": True,
        "prompt": request.prompt_ids,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop_token_ids": sorted(request.stop_token_ids),
        "ignore_eos": True,  # the request's own stop tokens are all there are
        "noise": request.noise,
        "order": request.order,
    }
    if request.model:
        body["model"] = request.model
    if request.top_logprobs:
        body["logprobs"] = request.top_logprobs
    return body | _constraint(request.grammar)


def _constraint(grammar: Grammar | None) -> dict[str, Any]:
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
        weights={int(version): mark for version, mark in choice.get("weights", {}).items()},
    )


def _canary(update: WeightUpdate) -> dict[str, Any]:
    assert update.canary is not None
    if not all(map(math.isfinite, update.canary.logprobs)):  # which JSON cannot say
        raise Mismatch(f"version {update.version} gives log probabilities that are not finite: its weights are broken")
    return dataclasses.asdict(update.canary)


def _packed(update: WeightUpdate) -> str:
    data = libraries.packed(update.tensors)
    return base64.b64encode(data).decode("ascii")


def _read(response: httpx.Response) -> Any:
    """The answer, or the server's own sentence as the error it stands for."""
    try:
        answer = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        answer = None
    if response.status_code == 200 and answer is not None:
        return answer
    raise _error(response, answer)


def _error(response: httpx.Response, answer: Any) -> EngineError:
    told = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(told, dict):
        # Nonsense in place of an answer says nothing of what became of the question, like no answer at all.
        kind = Unreachable if response.status_code == 200 or response.status_code >= 500 else EngineError
        return kind(f"{response.url} answered {response.status_code}, but not as a Paceline server does")
    message, code, status = str(told.get("message")), told.get("code"), response.status_code
    if code == MISMATCH:
        return Mismatch(message)
    if code == OTHER_BASE:
        return OtherBase(message)
    if code == "model_not_found":
        return UnknownModel(message)
    if code in ("shutting_down", "engine_unavailable"):
        return Unreachable(message)
    if status == 429:
        return Overloaded(message)
    if status in (400, 413, 415) and code != "update_refused":
        return RequestError(message)
    return EngineError(message)


def _forgive(task: "asyncio.Task[EngineStats]") -> None:
    """Ignore a failure of stats that no caller awaits; the next caller will hear of it."""
    if not task.cancelled():
        task.exception()
