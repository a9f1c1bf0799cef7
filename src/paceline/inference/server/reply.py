"""Runs the choices of chats and completions: turns tokens into text, stops, streams, counts."""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from paceline.inference.base import Completion, EngineError, GenerateRequest, Piece
from paceline.inference.frames import join
from paceline.inference.server.answers import usage
from paceline.inference.server.bodies import SamplingBody
from paceline.inference.server.errors import error_object, refusal_of
from paceline.inference.server.generation import Event, Generation
from paceline.inference.server.http import DONE, event
from paceline.inference.server.output_processor import ChoiceDelta, OutputProcessor
from paceline.inference.server.service import Service

Step = tuple[int, ChoiceDelta, bool]
"""A choice's index, what it gained, and whether it has ended."""


@dataclass(slots=True)
class ResponseChoices:
    """The choices of one request, as text."""

    service: Service
    body: SamplingBody
    requests: list[GenerateRequest]
    utterances: list[OutputProcessor]
    prompt_logprobs: list[list[float | None]] | None

    @classmethod
    async def plan(
        cls, service: Service, body: SamplingBody, requests: list[GenerateRequest], offsets: bool
    ) -> "ResponseChoices":
        utterances = [OutputProcessor(service.scribe, request, body.stops, offsets) for request in requests]
        scores = await score_prompts(service, requests) if body.prompt_logprobs else None
        return cls(service, body, requests, utterances, scores)

    async def steps(self, listen: bool) -> AsyncGenerator[Step]:
        """Everything the choices say, until all have ended. Several pieces of one choice are told together."""
        async with Generation(self.service.engine, self.service.post, self.requests, listen) as generation:
            async for events in generation.events():
                for index, (delta, ended) in self._hear(events, generation, listen).items():
                    yield index, delta, ended

    async def whole(self) -> list[ChoiceDelta]:
        """Every choice from beginning to end. Tokens are listened to only where a stop string may end it early."""
        deltas = [ChoiceDelta() for _ in self.requests]
        async for index, delta, _ in self.steps(listen=bool(self.body.stops)):
            deltas[index].add(delta)
        return deltas

    def _hear(self, events: list[Event], generation: Generation, listen: bool) -> dict[int, tuple[ChoiceDelta, bool]]:
        gained: dict[int, tuple[ChoiceDelta, bool]] = {}
        for index, what in merged(events):
            utterance = self.utterances[index]
            if utterance.finish is not None:
                continue
            delta = utterance.end(what, listen) if isinstance(what, Completion) else utterance.hear(what)
            if utterance.finish is not None:
                generation.stop(index)
            if index in gained:
                gained[index][0].add(delta)
                delta = gained[index][0]
            gained[index] = (delta, utterance.finish is not None)
        return gained

    def usage_of(self, index: int) -> dict[str, Any]:
        """Tokens of one choice so far."""
        utterance = self.utterances[index]
        return usage([self.requests[index]], 1, utterance.sampled, utterance.cached)

    def usage(self) -> dict[str, Any]:
        sampled = sum(utterance.sampled for utterance in self.utterances)
        cached = sum(utterance.cached for utterance in self.utterances[:: self.body.n or 1])
        return usage(self.requests, self.body.n or 1, sampled, cached)

    def extras(self, index: int, delta: ChoiceDelta, first: bool = True) -> dict[str, Any]:
        """Fields of a choice beyond OpenAI's shape, where the client asked for them."""
        extra: dict[str, Any] = {}
        if self.body.return_token_ids:
            extra |= {"prompt_token_ids": self.requests[index].prompt_ids} if first else {}
            extra["token_ids"] = delta.token_ids
        if self.body.return_versions:
            extra["versions"] = delta.versions
        if self.prompt_logprobs is not None and first:
            extra["prompt_logprobs"] = self.prompt_logprobs[index]
        return extra


def merged(events: list[Event]) -> Iterator[Event]:
    """The same events with all pieces of a choice as one: a stream that lags decodes them together."""
    if len(events) == 1:
        yield events[0]
        return
    pieces: dict[int, list[Piece]] = {}
    for index, what in events:
        if isinstance(what, Piece):
            pieces.setdefault(index, []).append(what)
    for index, some in pieces.items():
        yield index, join(some)
    yield from ((index, what) for index, what in events if isinstance(what, Completion))


async def stream(
    reply: ResponseChoices,
    heading: dict[str, Any],
    chunks: Callable[[int, ChoiceDelta, bool], Sequence[dict[str, Any]]],
) -> AsyncGenerator[bytes]:
    """Server-sent events of a reply; `chunks` gives the choices that one step adds."""
    options = reply.body.stream_options
    counts = bool(options and options.include_usage)
    always = bool(options and counts and options.continuous_usage_stats)
    if counts:
        heading = heading | {"usage": None}
    begun = False
    try:
        async with aclosing(reply.steps(listen=True)) as steps:
            async for index, delta, ended in steps:
                begins = heading | {"usage": reply.usage_of(index)} if always else heading
                data = b"".join(event(begins | {"choices": [choice]}) for choice in chunks(index, delta, ended))
                if data:
                    begun = True
                    yield data
    except EngineError as error:
        if not begun:
            raise
        refusal = refusal_of(error)
        yield b"data: " + error_object(refusal.status, str(refusal), refusal.param, refusal.code) + b"\n\n"
        return
    if counts:
        yield event(heading | {"choices": [], "usage": reply.usage()})
    yield DONE


async def score_prompts(service: Service, requests: Sequence[GenerateRequest]) -> list[list[float | None]]:
    """Log probabilities of each request's prompt tokens, at its temperature; None for the first, which has none."""
    distinct = list(dict.fromkeys(request.prompt_ids for request in requests))
    temperature = requests[0].temperature or 1.0
    scores = await service.engine.score(distinct, temperature, requests[0].model)
    known = {prompt: [None, *score[1:]] for prompt, score in zip(distinct, scores, strict=True)}
    return [known[request.prompt_ids] for request in requests]
