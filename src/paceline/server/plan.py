"""From a request body to engine requests: defaults, limits, noise and grammar, decided once."""

import json
import secrets
from collections.abc import Sequence
from typing import Any

from paceline.engine.base import GenerateRequest, Grammar
from paceline.server.bodies import ChatBody, NamedTool, ResponseFormat, SamplingBody
from paceline.server.errors import bad
from paceline.server.service import Models
from paceline.server.tokenizer import ServerTokenizer
from paceline.weights.bits import noise_key

MOST_CHOICES = 4096
MOST_STOPS = 64


async def plan(
    body: SamplingBody,
    prompts: Sequence[tuple[int, ...]],
    models: Models,
    tokenizer: ServerTokenizer,
    *,
    max_tokens: int | None,
    top_logprobs: int,
    grammar: Grammar | None,
) -> list[GenerateRequest]:
    """One engine request per prompt and choice, prompt by prompt. Whatever can never be answered is refused here."""
    model = await models.resolve(body.model)
    limits = models.limits
    for prompt in prompts:
        if not prompt:
            raise bad("the prompt is empty: give at least one token", "prompt")
        if len(prompt) >= limits.max_context:
            raise bad(
                f"the prompt has {len(prompt)} tokens, but the context holds {limits.max_context} with the answer",
                "prompt",
                "context_length_exceeded",
            )
        check_vocabulary(prompt, models, "prompt")
    copies = body.n or 1
    if len(prompts) * copies > MOST_CHOICES:
        raise bad(f"{len(prompts)} prompts times n = {copies} is more than {MOST_CHOICES} choices", "n")
    if len(body.stops) > MOST_STOPS:
        raise bad(f"{len(body.stops)} stop strings are more than {MOST_STOPS}", "stop")
    ends = frozenset() if body.ignore_eos else tokenizer.end_tokens
    first = secrets.randbits(64) if body.seed is None else body.seed
    return [
        GenerateRequest(
            prompt_ids=prompt,
            max_tokens=min(max_tokens or limits.max_context, limits.max_context),
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=min(max(body.top_k or 0, 0), limits.vocabulary),
            stop_token_ids=ends | frozenset(body.stop_token_ids or ()),
            noise=_noise(body, first, index),
            # Before others only where every caller holds the key.
            order=(body.order or 0) if models.has_key else max(body.order or 0, 0),
            turn=index,
            model=model,
            top_logprobs=min(top_logprobs, limits.max_top_logprobs),
            grammar=grammar,
        )
        for index, prompt in enumerate(prompt for prompt in prompts for _ in range(copies))
    ]


def check_vocabulary(token_ids: Sequence[int], models: Models, param: str) -> None:
    size = models.limits.vocabulary
    if token_ids and max(token_ids) >= size:
        raise bad(f"token {max(token_ids)} does not exist: the vocabulary has {size}", param)


def grammar_of(form: ResponseFormat | None, regex: str | None) -> Grammar | None:
    """The grammar the answer must follow, if any."""
    kind = form.type if form else "text"
    if regex is not None:
        if kind != "text":
            raise bad("give either `regex` or `response_format`, not both", "regex")
        return Grammar("regex", regex)
    if kind == "json_object":
        return Grammar("json")
    if kind == "json_schema":
        if form is None or form.json_schema is None:
            raise bad("response_format of type json_schema needs `json_schema`", "response_format.json_schema")
        return Grammar("json_schema", json.dumps(form.json_schema.schema_))
    return None


def forced_call(body: ChatBody) -> Grammar | None:
    """The grammar of a call the client demands: an object that names a tool and gives the arguments it takes."""
    if body.tool_choice in (None, "none", "auto"):
        return None
    tools = body.tools or []
    if isinstance(body.tool_choice, NamedTool):
        wanted = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == wanted]
        if not tools:
            raise bad(f"tool_choice names `{wanted}`, which is not among the tools", "tool_choice")
    if not tools:
        raise bad("tool_choice demands a call, but there are no tools", "tool_choice")
    schemas = [_call_schema(tool.function.name, tool.function.parameters) for tool in tools]
    return Grammar("json_schema", json.dumps({"anyOf": schemas} if len(schemas) > 1 else schemas[0]))


def _call_schema(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    properties = {"name": {"const": name}, "arguments": parameters or {"type": "object"}}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _noise(body: SamplingBody, seed: int, index: int) -> int:
    """An exact key is the first choice's own; further choices need streams of their own."""
    if body.noise is not None:
        return body.noise if index == 0 else noise_key(body.noise, index)
    return noise_key(seed, index)
