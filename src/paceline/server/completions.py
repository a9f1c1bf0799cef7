"""POST /v1/chat/completions and POST /v1/completions: bodies as engine requests, completions as answers.

Log probabilities have OpenAI's two shapes: a list of objects for chats, parallel arrays for completions.
"""

import json
import secrets
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from fastapi import Request, Response

from paceline.clients.tools import ToolCall, ToolParser, template_message
from paceline.engine.base import Completion, EngineLimits, GenerateRequest, Grammar, TopLogprobs
from paceline.server.answers import response_head, usage
from paceline.server.bodies import ChatBody, CompletionBody, NamedTool, ResponseFormat, SamplingBody
from paceline.server.errors import bad_request
from paceline.server.http import cancel_on_disconnect
from paceline.server.output_processor import ChoiceDelta, ChoiceWriter, Generation, score_prompts
from paceline.server.service import Service
from paceline.server.tokenizer import TokenBytes
from paceline.weights.update import noise_key

MOST_CHOICES = 4096
MOST_STOPS = 64
DEFAULT_MAX_TOKENS = 16


async def build_requests(
    service: Service,
    body: SamplingBody,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_tokens: int | None,
    top_logprobs: int,
    grammar: Grammar | None,
) -> list[GenerateRequest]:
    """One engine request per prompt and choice, prompt by prompt. Whatever can never be answered is refused here."""
    model = await service.resolve_model(body.model)
    limits = service.limits
    for prompt in prompts:
        if not prompt:
            raise bad_request("the prompt is empty: give at least one token", "prompt")
        if len(prompt) >= limits.max_context:
            raise bad_request(
                f"the prompt has {len(prompt)} tokens, but the context holds {limits.max_context} with the answer",
                "prompt",
                "context_length_exceeded",
            )
        check_vocabulary(prompt, limits, "prompt")
    copies = body.n or 1
    if len(prompts) * copies > MOST_CHOICES:
        raise bad_request(f"{len(prompts)} prompts times n = {copies} is more than {MOST_CHOICES} choices", "n")
    if len(body.stops) > MOST_STOPS:
        raise bad_request(f"{len(body.stops)} stop strings are more than {MOST_STOPS}", "stop")
    ends = frozenset() if body.ignore_eos else service.tokenizer.end_tokens
    key = body.seed if body.noise is None else body.noise
    key = secrets.randbits(64) if key is None else key
    return [
        GenerateRequest(
            prompt_ids=prompt,
            max_tokens=min(max_tokens or limits.max_context, limits.max_context),
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=min(max(body.top_k or 0, 0), limits.vocabulary),
            stop_token_ids=ends | frozenset(body.stop_token_ids or ()),
            # An exact key is the first choice's own; further choices need streams of their own.
            noise=key if index == 0 and body.noise is not None else noise_key(key, index),
            # Before others only where every caller holds the key.
            order=(body.order or 0) if service.has_key else max(body.order or 0, 0),
            queue_round=index,
            model=model,
            top_logprobs=min(top_logprobs, limits.max_top_logprobs),
            grammar=grammar,
        )
        for index, prompt in enumerate(prompt for prompt in prompts for _ in range(copies))
    ]


def check_vocabulary(token_ids: Sequence[int], limits: EngineLimits, param: str) -> None:
    if token_ids and max(token_ids) >= limits.vocabulary:
        raise bad_request(f"token {max(token_ids)} does not exist: the vocabulary has {limits.vocabulary}", param)


def response_grammar(form: ResponseFormat | None, regex: str | None) -> Grammar | None:
    kind = form.type if form else "text"
    if regex is not None:
        if kind != "text":
            raise bad_request("give either `regex` or `response_format`, not both", "regex")
        return Grammar("regex", regex)
    if kind == "json_object":
        return Grammar("json")
    if kind == "json_schema":
        if form is None or form.json_schema is None:
            raise bad_request("response_format of type json_schema needs `json_schema`", "response_format.json_schema")
        return Grammar("json_schema", json.dumps(form.json_schema.schema_))
    return None


def tool_choice_grammar(body: ChatBody) -> Grammar | None:
    """The grammar of a call the client demands: an object that names a tool and gives the arguments it takes."""
    if body.tool_choice in (None, "none", "auto"):
        return None
    tools = body.tools or []
    if isinstance(body.tool_choice, NamedTool):
        tool_name = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == tool_name]
        if not tools:
            raise bad_request(f"tool_choice names `{tool_name}`, which is not among the tools", "tool_choice")
    if not tools:
        raise bad_request("tool_choice demands a call, but there are no tools", "tool_choice")
    shape = {"type": "object", "required": ["name", "arguments"], "additionalProperties": False}
    schemas = []
    for function in (tool.function for tool in tools):
        fields = {"name": {"const": function.name}, "arguments": function.parameters or {"type": "object"}}
        schemas.append(shape | {"properties": fields})
    return Grammar("json_schema", json.dumps({"anyOf": schemas} if len(schemas) > 1 else schemas[0]))


async def create_chat_completion(service: Service, body: ChatBody, request: Request) -> Response:
    """Continue a conversation."""
    requests = await cancel_on_disconnect(request.receive, build_chat_requests(service, body))
    return await ChatWriter(service, body, requests).respond(request)


async def build_chat_requests(service: Service, body: ChatBody) -> list[GenerateRequest]:
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs `logprobs: true`", "top_logprobs")
    if body.stream_options and not body.stream:
        raise bad_request("stream_options needs `stream: true`", "stream_options")
    grammar = response_grammar(body.response_format, body.regex)
    forced = tool_choice_grammar(body)
    if grammar and forced:
        raise bad_request("give either a `response_format` or a `tool_choice` that demands a call", "tool_choice")
    messages = [template_message(message.model_dump()) for message in body.messages]
    # A model that must not call is not told of its tools.
    shown = body.tools if body.tools and body.tool_choice != "none" else None
    tools = [tool.model_dump(exclude_none=True) for tool in shown] if shown else None
    prompt = await service.tokenizer.render(messages, tools, body.chat_template_kwargs or {})
    return await build_requests(
        service,
        body,
        [prompt],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        top_logprobs=body.top_logprobs or 0,
        grammar=grammar or forced,
    )


MIN_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot hold."""


def completion_logprobs(delta: ChoiceDelta, token_bytes: TokenBytes, count: int, start: int = 0) -> dict[str, Any]:
    """`start` is where in the answer the text begins: after the prompt, where that is echoed."""
    return {
        "tokens": [token_bytes.decode_token(token)[0] for token in delta.token_ids],
        "token_logprobs": [max(logprob, MIN_LOGPROB) for logprob in delta.logprobs],
        "top_logprobs": [_top_logprobs(ranked[:count], token_bytes) for ranked in delta.top if count] or None,
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


class ChatWriter(ChoiceWriter[ChatBody]):
    """Writes choices as chat messages: text, tool calls, log probabilities."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, service: Service, body: ChatBody, requests: list[GenerateRequest]) -> None:
        super().__init__(service, body, requests)
        names = [tool.function.name for tool in body.tools or [] if body.tool_choice != "none"]
        self._tool_parsers = [ToolParser(names) if names else None for _ in requests]
        self._call_counts = [0] * len(requests)

    def chunk(self, index: int, delta: ChoiceDelta, first: bool, ended: bool) -> dict[str, Any] | None:
        text, calls = self._parse_tools(index, delta.text, ended)
        message: dict[str, Any] = {"role": "assistant", "content": text} if first else {"content": text}
        if calls:
            message["tool_calls"] = [
                {"index": self._call_counts[index] + place, **call.as_dict()} for place, call in enumerate(calls)
            ]
            self._call_counts[index] += len(calls)
        extras = self.extras(index, delta, first)
        finish = self._finish(index) if ended else None
        shown = extras or (self._body.logprobs and delta.token_ids)
        if not (first or text or calls or finish or shown):
            return None
        return {"index": index, "delta": message, "logprobs": self._logprobs(delta), "finish_reason": finish, **extras}

    def choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        text, calls = self._parse_tools(index, delta.text, ended=True)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [call.as_dict() for call in calls]
            self._call_counts[index] = len(calls)
        ending = {"logprobs": self._logprobs(delta), "finish_reason": self._finish(index)}
        return {"index": index, "message": message, **ending, **self.extras(index, delta)}

    def _parse_tools(self, index: int, text: str, ended: bool) -> tuple[str, list[ToolCall]]:
        parser = self._tool_parsers[index]
        if parser is None:
            return text, []
        plain_text, calls = parser.feed(text)
        if ended:
            rest, more = parser.flush()
            plain_text, calls = plain_text + rest, calls + more
        if self._body.parallel_tool_calls is False:
            calls = calls[: 0 if self._call_counts[index] else 1]
        return plain_text, calls

    def _finish(self, index: int) -> str | None:
        return "tool_calls" if self._call_counts[index] else self.outputs[index].finish

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        token_bytes, count = self._service.tokenizer.token_bytes, self._body.top_logprobs or 0
        content = []
        for place, token in enumerate(delta.token_ids):
            ranked = delta.top[place][:count] if delta.top else []
            others = [_logprob_entry(other, logprob, token_bytes) for other, logprob in ranked]
            content.append(_logprob_entry(token, delta.logprobs[place], token_bytes) | {"top_logprobs": others})
        return {"content": content, "refusal": None}


async def create_completion(service: Service, body: CompletionBody, request: Request) -> Response | dict[str, Any]:
    """Continue text or exact tokens."""
    requests = await _build_completion_requests(service, body)
    if body.flat:
        return await cancel_on_disconnect(request.receive, flat_answer(service, body, requests))
    return await CompletionWriter(service, body, requests, offsets=body.logprobs is not None).respond(request)


async def _build_completion_requests(service: Service, body: CompletionBody) -> list[GenerateRequest]:
    if body.flat and (body.stream or body.echo or body.stops):
        raise bad_request("flat answers hold no text: `stream`, `echo` and `stop` do not go with `flat`", "flat")
    if body.max_tokens == 0 and (body.flat or not body.echo):
        raise bad_request("max_tokens = 0 asks for nothing but the prompt: set `echo`", "max_tokens")
    if body.max_tokens == 0 and body.stream:
        raise bad_request("max_tokens = 0 leaves nothing to stream", "stream")
    if body.stream_options and not body.stream:
        raise bad_request("stream_options needs `stream: true`", "stream_options")
    inputs: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if inputs and isinstance(inputs[0], int):
        inputs = [inputs]
    if isinstance(inputs[0], str):
        prompts = await service.tokenizer.encode_all(inputs, special=True)
    else:
        prompts = [tuple(prompt) for prompt in inputs]
    return await build_requests(
        service,
        body,
        prompts,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        top_logprobs=body.logprobs or 0,
        grammar=response_grammar(body.response_format, body.regex),
    )


async def flat_answer(service: Service, body: CompletionBody, requests: list[GenerateRequest]) -> dict[str, Any]:
    scores = await score_prompts(service, requests) if body.prompt_logprobs else None
    async with Generation(service, requests, listen=False) as generation:
        completions = await generation.completions()
    choices = [_flat_choice(index, completion) for index, completion in enumerate(completions)]
    for index, choice in enumerate(choices):
        if scores is not None:
            choice["prompt_logprobs"] = scores[index]
        if body.return_token_ids:  # not by default: a client that sends token ids has them already
            choice["prompt_token_ids"] = requests[index].prompt_ids
    sampled = sum(len(completion.token_ids) for completion in completions)
    cached = sum(completion.cached for completion in completions[:: body.n or 1])
    head = response_head("text_completion", "cmpl", body.model or service.name)
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
        "queued_seconds": completion.queued,
    }
    if completion.weights:
        choice["weights"] = {str(version): mark for version, mark in completion.weights.items()}
    if completion.log_z is not None:
        choice["log_z"] = completion.log_z
    if completion.top is not None:
        choice["top_logprobs"] = completion.top
    return choice


class CompletionWriter(ChoiceWriter[CompletionBody]):
    """Writes choices as completions: text, arrays of log probabilities, the prompt before it if it is echoed."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    _prompt_deltas: list[ChoiceDelta] | None = None

    async def prepare(self) -> None:
        """With `echo`, take each prompt as if it had been said, with its log probabilities if those are wanted."""
        scored = self._body.echo and self._body.logprobs is not None
        if scored or self._body.prompt_logprobs:
            self.prompt_logprobs = await score_prompts(self._service, self.requests)
        if not self._body.echo:
            return
        tokenizer, self._prompt_deltas = self._service.tokenizer, []
        for place, request in enumerate(self.requests):
            delta = ChoiceDelta(tokenizer.decode_all(request.prompt_ids), list(request.prompt_ids))
            if scored:
                # The first token has no log probability; `_logprobs` writes null for it.
                delta.logprobs = [score or 0.0 for score in self.prompt_logprobs[place]]
                lengths = [len(tokenizer.token_bytes.decode_token(token)[0]) for token in request.prompt_ids]
                delta.offsets = list(accumulate(lengths[:-1], initial=0))
            self._prompt_deltas.append(delta)

    async def _collect_choices(self) -> list[ChoiceDelta]:
        if self._body.max_tokens == 0:
            return [ChoiceDelta() for _ in self.requests]
        return await super()._collect_choices()

    def chunk(self, index: int, delta: ChoiceDelta, first: bool, ended: bool) -> dict[str, Any] | None:
        finish = self.outputs[index].finish if ended else None
        choice = self._choice(index, delta, finish, first)
        shown = self._body.logprobs is not None or self._body.return_token_ids or self._body.return_versions
        return choice if choice["text"] or finish or (shown and delta.token_ids) else None

    def choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        return self._choice(index, delta, self.outputs[index].finish or "length", first=True)

    def _choice(self, index: int, delta: ChoiceDelta, finish: str | None, first: bool) -> dict[str, Any]:
        prompt = self._prompt_deltas[index] if self._prompt_deltas else None
        text = prompt.text + delta.text if prompt and first else delta.text
        logprobs = self._logprobs(delta, prompt, first) if self._body.logprobs is not None else None
        extras = self.extras(index, delta, first)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, **extras}

    def _logprobs(self, delta: ChoiceDelta, prompt: ChoiceDelta | None, first: bool) -> dict[str, Any]:
        token_bytes = self._service.tokenizer.token_bytes
        sampled = completion_logprobs(delta, token_bytes, self._body.logprobs or 0, len(prompt.text) if prompt else 0)
        if not prompt or not first:
            return sampled
        echoed = completion_logprobs(prompt, token_bytes, 0)
        both = {key: echoed[key] + sampled[key] for key in ("tokens", "token_logprobs", "text_offset")}
        both["token_logprobs"][0] = None
        ranked = sampled["top_logprobs"]
        return both | {"top_logprobs": [None] * len(echoed["tokens"]) + ranked if ranked is not None else None}
