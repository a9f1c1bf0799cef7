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
from paceline.server.http import unless_gone
from paceline.server.output_processor import ChoiceDelta, ChoiceWriter, completion_logprobs, score_prompts
from paceline.server.plan import grammar_of, plan
from paceline.server.service import Service

DEFAULT_MAX_TOKENS = 16


async def complete(service: Service, body: CompletionBody, request: Request) -> Response | dict[str, Any]:
    """Continue text or exact tokens."""
    requests = await _plan(service, body)
    if body.flat:
        return await unless_gone(request.receive, flat_answer(service, body, requests))
    writer = CompletionWriter(service, body, requests, offsets=body.logprobs is not None)
    await unless_gone(request.receive, writer.prepare())
    return await writer.respond(request)


async def _plan(service: Service, body: CompletionBody) -> list[GenerateRequest]:
    if body.flat and (body.stream or body.echo or body.stops):
        raise bad("flat answers hold no text: `stream`, `echo` and `stop` do not go with `flat`", "flat")
    if body.max_tokens == 0 and (body.flat or not body.echo):
        raise bad("max_tokens = 0 asks for nothing but the prompt: set `echo`", "max_tokens")
    if body.max_tokens == 0 and body.stream:
        raise bad("max_tokens = 0 leaves nothing to stream", "stream")
    if body.stream_options and not body.stream:
        raise bad("stream_options needs `stream: true`", "stream_options")
    given: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if given and isinstance(given[0], int):
        given = [given]
    if isinstance(given[0], str):
        prompts = await service.tokenizer.encode_all(given, special=True)
    else:
        prompts = [tuple(prompt) for prompt in given]
    return await plan(
        body,
        prompts,
        service.models,
        service.tokenizer,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        top_logprobs=body.logprobs or 0,
        grammar=grammar_of(body.response_format, body.regex),
    )


async def flat_answer(service: Service, body: CompletionBody, requests: list[GenerateRequest]) -> dict[str, Any]:
    """Choices as flat arrays, without text."""
    scores = await score_prompts(service, requests) if body.prompt_logprobs else None
    async with Generation(service.engine, service.queue, requests, listen=False) as generation:
        completions = await generation.completions()
    choices = [_flat_choice(index, completion) for index, completion in enumerate(completions)]
    for index, choice in enumerate(choices):
        if scores is not None:
            choice["prompt_logprobs"] = scores[index]
        if body.return_token_ids:  # not by default: a client that sends token ids has them already
            choice["prompt_token_ids"] = requests[index].prompt_ids
    sampled = sum(len(completion.token_ids) for completion in completions)
    cached = sum(completion.cached for completion in completions[:: body.n or 1])
    head = heading("text_completion", "cmpl", body.model or service.models.name)
    return head | {"choices": choices, "usage": usage(requests, body.n or 1, sampled, cached)}


def _flat_choice(index: int, completion: Completion) -> dict[str, Any]:
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


class CompletionWriter(ChoiceWriter):
    """Writes choices as completions: text, arrays of log probabilities, the prompt before it if it is echoed."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    _body: CompletionBody
    _echoed: list[ChoiceDelta] | None = None

    async def prepare(self) -> None:
        await asyncio.gather(super().prepare(), self._echo())

    async def _echo(self) -> None:
        """Take each prompt as if it had been said, with its log probabilities if those are wanted."""
        if not self._body.echo:
            return
        tokenizer, deltas = self._service.tokenizer, []
        scores = await score_prompts(self._service, self.requests) if self._body.logprobs is not None else None
        for place, request in enumerate(self.requests):
            delta = ChoiceDelta(tokenizer.decode_all(request.prompt_ids), list(request.prompt_ids))
            if scores:
                # The first token has no log probability; `_logprobs` writes null for it.
                delta.logprobs = [score or 0.0 for score in scores[place]]
                lengths = [len(tokenizer.token_bytes.spell(token)[0]) for token in request.prompt_ids]
                delta.offsets = list(accumulate(lengths[:-1], initial=0))
            deltas.append(delta)
        self._echoed = deltas

    async def _whole(self) -> list[ChoiceDelta]:
        return [ChoiceDelta() for _ in self.requests] if self._body.max_tokens == 0 else await super()._whole()

    def chunk(self, index: int, delta: ChoiceDelta, ended: bool) -> dict[str, Any] | None:
        finish = self.outputs[index].finish if ended else None
        choice = self._choice(index, delta, finish, index not in self._begun)
        shown = self._body.logprobs is not None or self._body.return_token_ids or self._body.return_versions
        if not (choice["text"] or finish or (shown and delta.token_ids)):
            return None
        self._begun.add(index)
        return choice

    def choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        return self._choice(index, delta, self.outputs[index].finish or "length", first=True)

    def _choice(self, index: int, delta: ChoiceDelta, finish: str | None, first: bool) -> dict[str, Any]:
        prompt = self._echoed[index] if self._echoed else None
        text = prompt.text + delta.text if prompt and first else delta.text
        logprobs = self._logprobs(delta, prompt, first) if self._body.logprobs is not None else None
        extras = self.extras(index, delta, first)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, **extras}

    def _logprobs(self, delta: ChoiceDelta, prompt: ChoiceDelta | None, first: bool) -> dict[str, Any]:
        token_bytes = self._service.tokenizer.token_bytes
        said = completion_logprobs(delta, token_bytes, self._body.logprobs or 0, len(prompt.text) if prompt else 0)
        if not prompt or not first:
            return said
        echoed = completion_logprobs(prompt, token_bytes, 0)
        both = {key: echoed[key] + said[key] for key in ("tokens", "token_logprobs", "text_offset")}
        both["token_logprobs"][0] = None
        ranked = said["top_logprobs"]
        return both | {"top_logprobs": [None] * len(echoed["tokens"]) + ranked if ranked is not None else None}
