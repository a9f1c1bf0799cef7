"""POST /v1/completions."""

import asyncio
from itertools import accumulate
from typing import Any

from fastapi import Request, Response

from paceline.engine.base import Completion, GenerateRequest
from paceline.server.answers import heading, usage
from paceline.server.bodies import CompletionBody
from paceline.server.errors import bad
from paceline.server.generation import Generation
from paceline.server.http import EventStream, FastJsonResponse, read_body, unless_gone
from paceline.server.output_processor import ChoiceDelta, ResponseChoices, completion_logprobs, score_prompts, stream
from paceline.server.plan import grammar_of, plan
from paceline.server.service import Service, service_of


async def flat_answer(service: Service, body: CompletionBody, requests: list[GenerateRequest]) -> dict[str, Any]:
    scores = await score_prompts(service, requests) if body.prompt_logprobs else None
    async with Generation(service.engine, service.queue, requests, listen=False) as generation:
        completions = await generation.completions()
    choices = [_choice(index, completion) for index, completion in enumerate(completions)]
    if scores is not None:
        choices = [choice | {"prompt_logprobs": score} for choice, score in zip(choices, scores, strict=True)]
    if body.return_token_ids:
        # Not by default: a client that sends token ids has them already.
        choices = [c | {"prompt_token_ids": r.prompt_ids} for c, r in zip(choices, requests, strict=True)]
    sampled = sum(len(completion.token_ids) for completion in completions)
    cached = sum(completion.cached for completion in completions[:: body.n or 1])
    head = heading("text_completion", "cmpl", body.model or service.models.name)
    return head | {"choices": choices, "usage": usage(requests, body.n or 1, sampled, cached)}


def _choice(index: int, completion: Completion) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "finish_reason": completion.finish,
        "token_ids": completion.token_ids,
        "token_logprobs": completion.logprobs,
        "versions": completion.versions,
        "recomputed": completion.recomputed,
        "cached_tokens": completion.cached,
    }
    if completion.weights:
        choice["weights"] = {str(version): mark for version, mark in completion.weights.items()}
    if completion.log_z is not None:
        choice["log_z"] = completion.log_z
    if completion.top is not None:
        choice["top_logprobs"] = completion.top
    return choice


DEFAULT_MAX_TOKENS = 16


async def complete(request: Request) -> Response:
    """Continue text or exact tokens."""
    service = service_of(request)
    body = await read_body(request, CompletionBody)
    requests = await _plan(service, body)
    if body.flat:
        return FastJsonResponse(await unless_gone(request.receive, flat_answer(service, body, requests)))
    text = await unless_gone(request.receive, Continuation.plan(service, body, requests))
    if body.stream:
        head = heading("text_completion", "cmpl", body.model or service.models.name)
        return await EventStream.begin(request, stream(text.reply, head, text.chunks))
    return FastJsonResponse(await unless_gone(request.receive, text.answer()))


async def _plan(service: Service, body: CompletionBody) -> list[GenerateRequest]:
    if body.flat and (body.stream or body.echo or body.stops):
        raise bad("flat answers hold no text: `stream`, `echo` and `stop` do not go with `flat`", "flat")
    if body.max_tokens == 0 and (body.flat or not body.echo):
        raise bad("max_tokens = 0 asks for nothing but the prompt: set `echo`", "max_tokens")
    if body.max_tokens == 0 and body.stream:
        raise bad("max_tokens = 0 leaves nothing to stream", "stream")
    if body.stream_options and not body.stream:
        raise bad("stream_options needs `stream: true`", "stream_options")
    return await plan(
        body,
        await _prompts(service, body),
        service.models,
        service.tokenizer,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        top_logprobs=body.logprobs or 0,
        grammar=grammar_of(body.response_format, body.regex),
    )


async def _prompts(service: Service, body: CompletionBody) -> list[tuple[int, ...]]:
    """One or several prompts, as text or tokens."""
    given: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if given and isinstance(given[0], int):
        given = [given]
    if isinstance(given[0], str):
        return await service.tokenizer.encode_all(given, special=True)
    return [tuple(prompt) for prompt in given]


class Continuation:
    """Shapes a reply as completions: text, arrays of log probabilities, the prompt before it if it is echoed."""

    def __init__(
        self, service: Service, body: CompletionBody, reply: ResponseChoices, echoed: list[ChoiceDelta] | None
    ) -> None:
        self._service = service
        self._body = body
        self._echoed = echoed
        self.reply = reply
        self._begun: set[int] = set()

    @classmethod
    async def plan(cls, service: Service, body: CompletionBody, requests: list[GenerateRequest]) -> "Continuation":
        reply, echoed = await asyncio.gather(
            ResponseChoices.plan(service, body, requests, offsets=body.logprobs is not None),
            _echo(service, body, requests) if body.echo else _nothing(),
        )
        return cls(service, body, reply, echoed)

    async def answer(self) -> dict[str, Any]:
        nothing = self._body.max_tokens == 0
        deltas = [ChoiceDelta() for _ in self.reply.requests] if nothing else await self.reply.whole()
        choices = [
            self._choice(index, delta, "length" if nothing else self.reply.outputs[index].finish, first=True)
            for index, delta in enumerate(deltas)
        ]
        head = heading("text_completion", "cmpl", self._body.model or self._service.models.name)
        return head | {"choices": choices, "usage": self.reply.usage()}

    def chunks(self, index: int, delta: ChoiceDelta, ended: bool) -> list[dict[str, Any]]:
        first = index not in self._begun
        finish = self.reply.outputs[index].finish if ended else None
        choice = self._choice(index, delta, finish, first)
        shown = self._body.logprobs is not None or self._body.return_token_ids or self._body.return_versions
        if not (choice["text"] or finish or (shown and delta.token_ids)):
            return []
        self._begun.add(index)
        return [choice]

    def _choice(self, index: int, delta: ChoiceDelta, finish: str | None, first: bool) -> dict[str, Any]:
        prompt = self._echoed[index] if self._echoed else None
        text = prompt.text + delta.text if prompt and first else delta.text
        logprobs = self._logprobs(delta, prompt, first) if self._body.logprobs is not None else None
        extras = self.reply.extras(index, delta, first)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, **extras}

    def _logprobs(self, delta: ChoiceDelta, prompt: ChoiceDelta | None, first: bool) -> dict[str, Any]:
        token_bytes = self._service.tokenizer.token_bytes
        start = len(prompt.text) if prompt else 0
        said = completion_logprobs(delta, token_bytes, self._body.logprobs or 0, start)
        return _joined(completion_logprobs(prompt, token_bytes, 0), said) if prompt and first else said


async def _nothing() -> None:
    return None


async def _echo(service: Service, body: CompletionBody, requests: list[GenerateRequest]) -> list[ChoiceDelta]:
    """Each prompt as if it had been said, with its log probabilities if those are wanted."""
    deltas = []
    scores = await score_prompts(service, requests) if body.logprobs is not None else None
    for place, request in enumerate(requests):
        delta = ChoiceDelta(service.tokenizer.decode_all(request.prompt_ids), list(request.prompt_ids))
        if scores:
            # The first token has no log probability; `_joined` writes null for it.
            delta.logprobs = [score or 0.0 for score in scores[place]]
            lengths = [len(service.tokenizer.token_bytes.spell(token)[0]) for token in request.prompt_ids]
            delta.offsets = list(accumulate(lengths[:-1], initial=0))
        deltas.append(delta)
    return deltas


def _joined(prompt: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Log probabilities of prompt and completion as one."""
    both = {key: prompt[key] + said[key] for key in ("tokens", "token_logprobs", "text_offset")}
    both["token_logprobs"][0] = None
    ranked = said["top_logprobs"]
    return both | {"top_logprobs": [None] * len(prompt["tokens"]) + ranked if ranked is not None else None}
