"""An engine behind a running `paceline serve`, used as if it were in this process."""

import asyncio
import base64
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import orjson

from paceline.clients.remote import CONNECT_SECONDS, HttpConnection, Question, RemoteEngine, finite_canary, in_one_piece
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
from paceline.weights.update import ServedPolicy, WeightUpdate
from paceline.weights.weight_store import copied

FRESH_SECONDS = 1.0
"""How old `busy_seconds` may grow while answers come in."""
SEQUENCES_AT_ONCE = 256
SCORED_AT_ONCE = 128_000
"""Tokens in one request for scores, unless one sequence has more: a server bounds what a body may hold."""
STATS = frozenset(field.name for field in dataclasses.fields(EngineStats))


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
        self._travel = path, folder
        self._asked = 0.0
        self._asking: asyncio.Task[EngineStats] | None = None

    def start(self) -> None:
        """Check that a server answers here, takes our key and has an engine that lives."""
        for path in ("/health", "/limits"):
            self.look(path, seconds=CONNECT_SECONDS)

    def close(self) -> None:
        self._leave()
        super().close()

    async def aclose(self) -> None:
        self._leave()
        await super().aclose()

    async def generate(self, request: GenerateRequest, listener: Listener | None = None) -> Completion:
        completion = _completion((await self.post("/v1/completions", _body(request)))["choices"][0])
        if time.monotonic() - self._asked > FRESH_SECONDS and (self._asking is None or self._asking.done()):
            self._asking = asyncio.ensure_future(self.stats())
            # The next caller hears of a failure.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        return in_one_piece(completion, listener)

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, model: str = ""
    ) -> list[list[float]]:
        scores: list[list[float]] = []
        for some in _portions(sequences):
            body = {"token_ids": some, "temperature": temperature} | ({"model": model} if model else {})
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
            answer = await self._carrier.send(self, head, await self.keep(update))
        else:
            packed = await asyncio.to_thread(lambda: base64.b64encode(libraries.packed(update.tensors)))
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
        self._asked = time.monotonic()
        answer = await self.get("/stats")
        stats = EngineStats(**{name: value for name, value in answer.items() if name in STATS})
        self._busy = stats.busy_seconds
        return stats

    async def _ask(self, what: Question) -> Any:
        return await self.post(f"/{what}")

    async def keep(self, update: WeightUpdate) -> WeightUpdate:
        """A copy of an update that can be sent again later, whatever the trainer has done to its tensors by then."""
        if update.adapter is not None:
            return copied(update)
        return await self._carrier.keep(update)

    @cached_property
    def _carrier(self) -> WeightTransport:
        """Made when weights first travel: most engines behind HTTP only answer."""
        return transport_for(*self._travel)

    async def stream(self, path: str, head: dict[str, Any], size: int, pieces: AsyncIterator[bytes]) -> Any:
        """For the carrier: a request with raw bytes, the head in a header of its own."""
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        headers[UPDATE_HEADER] = orjson.dumps(head).decode("ascii")
        return await self._request("POST", path, content=pieces, headers=headers)

    def _leave(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        if "_carrier" in self.__dict__:
            self._carrier.close()

    def _read(self, response: httpx.Response) -> Any:
        """The answer, or the server's own sentence as the error it stands for."""
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
        raise KINDS.get(str(error.get("code")), by_status)(str(error.get("message")))


KINDS = {
    "weights_mismatch": Mismatch,
    "other_base": DeltaBaseMismatch,
    "model_not_found": UnknownModel,
    "shutting_down": Unreachable,
    "engine_unavailable": Unreachable,
    "update_refused": EngineError,
}
"""What a refusal means, by its code; by its status for all others."""


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
