"""Runs the choices of chats and completions: turns tokens into text, stops, streams, counts."""

import asyncio
import codecs
import copy
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from operator import iadd
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request, Response

from paceline.clients.rpc import as_piece, join_pieces
from paceline.clients.tools import begun_mark_length
from paceline.engine.base import Completion, GenerateRequest, Piece, TopLogprobs
from paceline.errors import EngineError
from paceline.server.answers import response_head, usage
from paceline.server.bodies import SamplingBody
from paceline.server.errors import Refusal, engine_refusal, error_object
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
        sure = len(text) - begun_mark_length(text, *self.stops)
        self._buffer = text[sure:]
        return text[:sure]

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
        for name in self.__slots__:
            setattr(self, name, iadd(getattr(self, name), getattr(other, name)))


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
        delta = ChoiceDelta() if listened else self.process(as_piece(completion))
        if self.finish is None:
            delta.text += self._matcher.feed(self._detokenizer.flush())
            delta.text += self._matcher.flush()
            self.finish = "stop" if self._matcher.found else completion.finish
        return delta

    def _tokens_to_stop(self, token_ids: list[int], detokeniser: Detokenizer, matcher: StopMatcher) -> int:
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


CHOICES_PER_TURN = 32
"""Choices submitted in one turn of the event loop, so that a request of thousands does not block others."""


class Generation:
    """Runs requests concurrently and reports their events, in order for each choice.

    Leaving the context takes whatever still runs out of the engine, however it is left: done, failed, or because the
    client is gone.
    """

    def __init__(self, service: Service, requests: Sequence[GenerateRequest], listen: bool) -> None:
        self._service, self._requests, self._listen = service, requests, listen
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks: list[asyncio.Task[Completion]] = []
        self._stopped_choices: set[int] = set()

    async def __aenter__(self) -> "Generation":
        try:
            for index, request in enumerate(self._requests):
                if index and index % CHOICES_PER_TURN == 0:
                    await asyncio.sleep(0)
                listener = partial(self._enqueue, index) if self._listen else None
                task = asyncio.ensure_future(self._service.engine.generate(request, listener))
                task.add_done_callback(partial(self._on_done, index))
                self._tasks.append(task)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()

    def stop(self, index: int) -> None:
        """Cancel a choice whose text is complete, as after a stop string."""
        self._stopped_choices.add(index)
        self._tasks[index].cancel()

    async def events(self) -> AsyncIterator[dict[int, list[Piece | Completion]]]:
        """What came since the last look, by choice: new tokens, and at last its completion. Ends when every choice has
        ended; the first failure ends it all."""
        running = len(self._tasks)
        while running:
            events: dict[int, list[Piece | Completion]] = {}
            messages = [await self._inbox.get()]  # bounded: by the client's patience
            while not self._inbox.empty():  # a reader that is late finds several, and answers them together
                messages.append(self._inbox.get_nowait())
            for index, item in messages:
                if isinstance(item, asyncio.Task):
                    running -= 1
                    if index in self._stopped_choices:
                        continue
                    item = await item  # bounded: it is done
                events.setdefault(index, []).append(item)
            yield events

    async def completions(self) -> list[Completion]:
        return await asyncio.gather(*self._tasks)  # bounded: by the client's patience

    def _enqueue(self, index: int, item: "Piece | asyncio.Task[Completion]") -> None:
        self._service.queue.send((self._inbox, (index, item)))

    def _on_done(self, index: int, task: "asyncio.Task[Completion]") -> None:
        _ = task.cancelled() or task.exception()  # looked at: else a later failure would count as never retrieved
        self._enqueue(index, task)  # by the same queue as the pieces, or the end could overtake them


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
        self.prompt_logprobs: list[list[float | None]] = []
        self._head: dict[str, Any] = {}

    async def prepare(self) -> None:
        """Ask for log probabilities of the prompts, where the client wants them."""
        if self._body.prompt_logprobs:
            self.prompt_logprobs = await score_prompts(self._service, self.requests)

    @abstractmethod
    def choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        """A choice as a whole."""

    @abstractmethod
    def chunk(self, index: int, delta: ChoiceDelta, first: bool, ended: bool) -> dict[str, Any] | None:
        """A choice's chunk of a stream after one step; None if there is nothing to send."""

    async def respond(self, request: Request) -> Response:
        if self._body.stream:
            return await EventStream.begin(request, self._events())
        return FastJsonResponse(await cancel_on_disconnect(request.receive, self.full_response()))

    async def full_response(self) -> dict[str, Any]:
        await self.prepare()
        choices = [self.choice(index, delta) for index, delta in enumerate(await self._collect_choices())]
        return self._response_head(self.kind) | {"choices": choices, "usage": self.usage()}

    async def _events(self) -> AsyncGenerator[bytes]:
        """Server-sent events. An error before the first one has a status of its own."""
        await self.prepare()
        self._head = self._response_head(self.chunk_kind) | ({"usage": None} if self._includes_usage else {})
        begun, streamed = False, set()
        try:
            async with aclosing(self._steps(listen=True)) as steps:
                async for index, delta, ended in steps:
                    if chunk := self.chunk(index, delta, index not in streamed, ended):
                        streamed.add(index)
                        if data := self.encode(chunk):
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
        request, output = self.requests[chunk["index"]], self.outputs[chunk["index"]]
        used = {"usage": usage([request], 1, output.sampled, output.cached)} if always else {}
        return sse_event(self._head | used | {"choices": [chunk]})

    def encode_failure(self, refusal: Refusal) -> bytes:
        return b"data: " + error_object(refusal.status, str(refusal), refusal.param, refusal.code) + b"\n\n"

    def encode_end(self) -> bytes:
        counts = sse_event(self._head | {"choices": [], "usage": self.usage()}) if self._includes_usage else b""
        return counts + SSE_DONE

    @property
    def _includes_usage(self) -> bool:
        return bool(self._body.stream_options and self._body.stream_options.include_usage)

    def _response_head(self, kind: str) -> dict[str, Any]:
        return response_head(kind, self.prefix, self._body.model or self._service.name)

    async def _steps(self, listen: bool) -> AsyncGenerator[tuple[int, ChoiceDelta, bool]]:
        """A choice's index, what it gained, and whether it has ended, until all have. Several pieces of one choice are
        decoded together: a stream that lags has them."""
        async with Generation(self._service, self.requests, listen) as generation:
            async for events in generation.events():
                for index, items in events.items():
                    output = self.outputs[index]
                    if output.finish is not None:
                        continue
                    pieces = [item for item in items if isinstance(item, Piece)]
                    delta = output.process(join_pieces(pieces)) if pieces else ChoiceDelta()
                    if output.finish is None and isinstance(items[-1], Completion):
                        delta.add(output.end(items[-1], listen))
                    if output.finish is not None:
                        generation.stop(index)
                    yield index, delta, output.finish is not None

    async def _collect_choices(self) -> list[ChoiceDelta]:
        """Every choice from beginning to end. Tokens are listened to only where a stop string may end it early."""
        deltas = [ChoiceDelta() for _ in self.requests]
        async for index, delta, _ in self._steps(listen=bool(self._body.stops)):
            deltas[index].add(delta)
        return deltas

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
        if self._body.prompt_logprobs and first:
            extra["prompt_logprobs"] = self.prompt_logprobs[index]
        return extra


async def score_prompts(service: Service, requests: Sequence[GenerateRequest]) -> list[list[float | None]]:
    """Log probabilities of each request's prompt tokens, at its temperature; None for the first, which has none."""
    distinct = list(dict.fromkeys(request.prompt_ids for request in requests))
    temperature = requests[0].temperature or 1.0
    scores = await service.engine.score(distinct, temperature, requests[0].model)
    known = {prompt: [None, *score[1:]] for prompt, score in zip(distinct, scores, strict=True)}
    return [known[request.prompt_ids] for request in requests]
