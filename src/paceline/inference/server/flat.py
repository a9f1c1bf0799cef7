"""The fast form for training loops: arrays as the engine made them, no text, no object per token."""

from typing import Any

from paceline.inference.base import Completion, GenerateRequest
from paceline.inference.server.bodies import CompletionBody
from paceline.inference.server.generation import Generation
from paceline.inference.server.reply import score_prompts
from paceline.inference.server.service import Service
from paceline.inference.server.usage import heading, usage


async def flat_answer(service: Service, body: CompletionBody, requests: list[GenerateRequest]) -> dict[str, Any]:
    scores = await score_prompts(service, requests) if body.prompt_logprobs else None
    async with Generation(service.engine, service.post, requests, listen=False) as generation:
        completions = await generation.completions()
    choices = [_choice(index, completion) for index, completion in enumerate(completions)]
    if scores is not None:
        choices = [choice | {"prompt_logprobs": score} for choice, score in zip(choices, scores, strict=True)]
    if body.return_token_ids:
        # Not by default: whoever sends token ids has them already.
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
