"""Runs the choices of chats and completions: turns tokens into text, stops, streams, counts.

Log probabilities have OpenAI's two shapes: a list of objects for chats, parallel arrays for completions.
"""

import codecs
import copy
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request, Response

from paceline.clients.rpc import join_pieces
from paceline.engine.base import Completion, GenerateRequest, Piece, TopLogprobs
from paceline.errors import EngineError
from paceline.server.answers import response_head, usage
from paceline.server.bodies import SamplingBody
from paceline.server.errors import Refusal, engine_refusal, error_object
from paceline.server.generation import Event, Generation
from paceline.server.http import SSE_DONE, EventStream, FastJsonResponse, cancel_on_disconnect, sse_event
from paceline.server.service import Service
from paceline.server.tokenizer import Detokenizer, ServerTokenizer, TokenBytes

B = TypeVar("B", bound=SamplingBody)


class StopMatcher:
    """Passes text on until a stop string is complete, and then nothing more.

    The stop string that is complete first wins; of two that end together, the longer. So the outcome depends on the
    text alone, never on how it was cut. Text that may still become a stop string is held back.

        stops ["END"]:  "one E" -> "one ",  "NT" -> "ENT",  " EN" -> " ",  "D" -> "", found
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._buffer = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The part of the text, and of text held back before, that is sure to belong to the answer."""
        if self.found:
            return ""
        if not self.stops:
            return text
        text = self._buffer + text
        hits = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        if hits:
            self.found, self._buffer = True, ""
            return text[: min(hits)[1]]
        # The longest end of the text with which some stop string begins.
        longest = min(max(map(len, self.stops)) - 1, len(text))
        keep = next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self.stops)), 0)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text is over: what was held back is no stop string after all."""
        text, self._buffer = self._buffer, ""
        return text


@dataclass(slots=True)
class ChoiceDelta:
    """New output of a choice: text that is sure, and the tokens that were sampled."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Where in the text each token begins; only where asked for."""

    def add(self, other: "ChoiceDelta") -> None:
        self.text += other.text
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.versions += other.versions
        self.top += other.top
        self.offsets += other.offsets


class OutputProcessor:
    """Detokenizes one choice and ends it at a stop string.

    A piece is decoded as a whole; only where a stop string ends inside it are its tokens gone through one by one.
    The tokens reported are all that were sampled, to the one that completed the stop: only the text is cut.
    """

    def __init__(
        self, tokenizer: ServerTokenizer, request: GenerateRequest, stops: Sequence[str], offsets: bool
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(request.prompt_ids)
        self._matcher = StopMatcher(stops)
        self._stop_token_ids = request.stop_token_ids
        self._offset_tracker = OffsetTracker(tokenizer.token_bytes) if offsets else None
        self.finish: str | None = None
        self.sampled = 0
        self.cached = 0

    def process(self, piece: Piece) -> ChoiceDelta:
        """The output that new tokens add; empty once `finish` is set."""
        if self.finish:
            return ChoiceDelta()
        before = (self._detokenizer.copy(), copy.copy(self._matcher)) if self._matcher.stops else None
        ids, taken = piece.token_ids, len(piece.token_ids)
        # The token that only ends the answer is no part of its text; nothing comes after it.
        text = self._matcher.feed(self._detokenizer.feed(ids[:-1] if ids and ids[-1] in self._stop_token_ids else ids))
        if before and self._matcher.found:
            self.finish = "stop"
            taken = self._tokens_to_stop(ids, *before)
        self.sampled += taken
        delta = ChoiceDelta(text, ids[:taken], piece.logprobs[:taken], piece.versions[:taken])
        delta.top = (piece.top or [])[:taken]
        if self._offset_tracker is not None:
            delta.offsets = self._offset_tracker.next_offsets(delta.token_ids)
        return delta

    def end(self, completion: Completion, listened: bool) -> ChoiceDelta:
        """The output that remains when the engine is done: text held back, or all of it if it was not streamed."""
        self.cached = completion.cached
        delta = ChoiceDelta()
        if not listened:
            whole = Piece(completion.token_ids, completion.logprobs, completion.versions, completion.top)
            delta = self.process(whole)
        if self.finish is None:
            delta.text += self._matcher.feed(self._detokenizer.flush())
            delta.text += self._matcher.flush()
            self.finish = "stop" if self._matcher.found else completion.finish
        return delta

    def _tokens_to_stop(self, token_ids: list[int], detokeniser: Detokenizer, matcher: StopMatcher) -> int:
        """How many tokens it takes to complete the stop string."""
        for place, token in enumerate(token_ids, start=1):
            matcher.feed(detokeniser.feed((token,)))
            if matcher.found:
                return place
        return len(token_ids)


class OffsetTracker:
    """Tells where in the text each token begins, from the tokens' bytes: half a letter has no length yet."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._length = 0

    def next_offsets(self, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token in token_ids:
            offsets.append(self._length)
            self._length += len(self._decode(bytes(self._token_bytes.decode_token(token)[1])))
        return offsets


MIN_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot hold."""


def chat_logprobs(delta: ChoiceDelta, token_bytes: TokenBytes, count: int) -> dict[str, Any]:
    content = []
    for place, token in enumerate(delta.token_ids):
        ranked = delta.top[place][:count] if count and delta.top else []
        content.append(
            _logprob_entry(token, delta.logprobs[place], token_bytes)
            | {"top_logprobs": [_logprob_entry(other, logprob, token_bytes) for other, logprob in ranked]}
        )
    return {"content": content, "refusal": None}


def completion_logprobs(delta: ChoiceDelta, token_bytes: TokenBytes, count: int, start: int = 0) -> dict[str, Any]:
    """`start` is where in the answer the text begins: after the prompt, where that is echoed."""
    return {
        "tokens": [token_bytes.decode_token(token)[0] for token in delta.token_ids],
        "token_logprobs": [max(logprob, MIN_LOGPROB) for logprob in delta.logprobs],
        "top_logprobs": [_top_logprobs(ranked[:count], token_bytes) for ranked in delta.top]
        if count and delta.top
        else None,
        "text_offset": [start + offset for offset in delta.offsets],
    }


def _logprob_entry(token: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    text, data = token_bytes.decode_token(token)
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": data}


def _top_logprobs(ranked: TopLogprobs, token_bytes: TokenBytes) -> dict[str, float]:
    named: dict[str, float] = {}
    for token, logprob in ranked:  # two may be spelt alike: the more probable one comes first and stays
        named.setdefault(token_bytes.decode_token(token)[0], max(logprob, MIN_LOGPROB))
    return named


class ChoiceWriter(ABC, Generic[B]):
    """Runs the choices of one request and writes them in a format of the API: whole, or as the events of a stream."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]
    """Of the response's id."""

    def __init__(self, service: Service, body: B, requests: list[GenerateRequest], *, offsets: bool = False) -> None:
        self._service, self._body = service, body
        self.requests = requests
        self.outputs = [OutputProcessor(service.tokenizer, request, body.stops, offsets) for request in requests]
        self.prompt_logprobs: list[list[float | None]] | None = None
        self._streamed_choices: set[int] = set()
        """Choices of which a chunk was sent."""
        self._head: dict[str, Any] = {}

    async def prepare(self) -> None:
        """Ask for log probabilities of the prompts, where the client wants them."""
        if self._body.prompt_logprobs:
            self.prompt_logprobs = await score_prompts(self._service, self.requests)

    @abstractmethod
    def choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        """A choice as a whole."""

    @abstractmethod
    def chunk(self, index: int, delta: ChoiceDelta, ended: bool) -> dict[str, Any] | None:
        """A choice's chunk of a stream after one step; None if there is nothing to send."""

    async def respond(self, request: Request) -> Response:
        if self._body.stream:
            return await EventStream.begin(request, self._events())
        return FastJsonResponse(await cancel_on_disconnect(request.receive, self.full_response()))

    async def full_response(self) -> dict[str, Any]:
        choices = [self.choice(index, delta) for index, delta in enumerate(await self._collect_choices())]
        return self._response_head(self.kind) | {"choices": choices, "usage": self.usage()}

    async def _events(self) -> AsyncGenerator[bytes]:
        """Server-sent events. An error before the first one has a status of its own."""
        self._head = self._response_head(self.chunk_kind) | ({"usage": None} if self._includes_usage else {})
        begun = False
        try:
            async with aclosing(self._steps(listen=True)) as steps:
                async for index, delta, ended in steps:
                    if (chunk := self.chunk(index, delta, ended)) and (data := self.encode(chunk)):
                        begun = True
                        yield data
        except EngineError as error:
            if not begun:
                raise
            yield self.encode_failure(engine_refusal(error))
            return
        yield self.encode_end()

    def encode(self, chunk: dict[str, Any]) -> bytes:
        options = self._body.stream_options
        always = options and self._includes_usage and options.continuous_usage_stats
        used = {"usage": self._choice_usage(chunk["index"])} if always else {}
        return sse_event(self._head | used | {"choices": [chunk]})

    def encode_failure(self, refusal: Refusal) -> bytes:
        return b"data: " + error_object(refusal.status, str(refusal), refusal.param, refusal.code) + b"\n\n"

    def encode_end(self) -> bytes:
        return (
            sse_event(self._head | {"choices": [], "usage": self.usage()}) if self._includes_usage else b""
        ) + SSE_DONE

    @property
    def _includes_usage(self) -> bool:
        """Whether a stream ends with the number of its tokens."""
        return bool(self._body.stream_options and self._body.stream_options.include_usage)

    def _response_head(self, kind: str) -> dict[str, Any]:
        return response_head(kind, self.prefix, self._body.model or self._service.models.name)

    async def _steps(self, listen: bool) -> AsyncGenerator[tuple[int, ChoiceDelta, bool]]:
        """A choice's index, what it gained, and whether it has ended, until all have. Several pieces of one choice are
        told together."""
        async with Generation(self._service.engine, self._service.queue, self.requests, listen) as generation:
            async for events in generation.events():
                deltas: dict[int, ChoiceDelta] = {}
                for index, item in merge_pieces(events):
                    output = self.outputs[index]
                    if output.finish is not None:
                        continue
                    delta = output.end(item, listen) if isinstance(item, Completion) else output.process(item)
                    if output.finish is not None:
                        generation.stop(index)
                    if index in deltas:
                        deltas[index].add(delta)
                    else:
                        deltas[index] = delta
                for index, delta in deltas.items():
                    yield index, delta, self.outputs[index].finish is not None

    async def _collect_choices(self) -> list[ChoiceDelta]:
        """Every choice from beginning to end. Tokens are listened to only where a stop string may end it early."""
        deltas = [ChoiceDelta() for _ in self.requests]
        async for index, delta, _ in self._steps(listen=bool(self._body.stops)):
            deltas[index].add(delta)
        return deltas

    def _choice_usage(self, index: int) -> dict[str, Any]:
        """Tokens of one choice so far."""
        return usage([self.requests[index]], 1, self.outputs[index].sampled, self.outputs[index].cached)

    def usage(self) -> dict[str, Any]:
        sampled = sum(output.sampled for output in self.outputs)
        cached = sum(output.cached for output in self.outputs[:: self._body.n or 1])
        return usage(self.requests, self._body.n or 1, sampled, cached)

    def extras(self, index: int, delta: ChoiceDelta, first: bool = True) -> dict[str, Any]:
        """Fields of a choice beyond OpenAI's shape, where the client asked for them."""
        extra: dict[str, Any] = {}
        if self._body.return_token_ids:
            extra |= {"prompt_token_ids": self.requests[index].prompt_ids} if first else {}
            extra["token_ids"] = delta.token_ids
        if self._body.return_versions:
            extra["versions"] = delta.versions
        if self.prompt_logprobs is not None and first:
            extra["prompt_logprobs"] = self.prompt_logprobs[index]
        return extra


def merge_pieces(events: list[Event]) -> Iterator[Event]:
    """The same events with all pieces of a choice as one: a stream that lags decodes them together."""
    if len(events) == 1:
        yield events[0]
        return
    pieces: dict[int, list[Piece]] = {}
    for index, item in events:
        if isinstance(item, Piece):
            pieces.setdefault(index, []).append(item)
    for index, chunks in pieces.items():
        yield index, join_pieces(chunks)
    yield from ((index, item) for index, item in events if isinstance(item, Completion))


async def score_prompts(service: Service, requests: Sequence[GenerateRequest]) -> list[list[float | None]]:
    """Log probabilities of each request's prompt tokens, at its temperature; None for the first, which has none."""
    distinct = list(dict.fromkeys(request.prompt_ids for request in requests))
    temperature = requests[0].temperature or 1.0
    scores = await service.engine.score(distinct, temperature, requests[0].model)
    known = {prompt: [None, *score[1:]] for prompt, score in zip(distinct, scores, strict=True)}
    return [known[request.prompt_ids] for request in requests]
