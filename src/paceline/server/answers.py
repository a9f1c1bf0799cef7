"""Response models for the OpenAPI document. The server builds responses by hand, for speed."""

import time
import uuid
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel

from paceline.engine.base import GenerateRequest


def usage(requests: Iterable[GenerateRequest], copies: int, sampled: int, cached: int) -> dict[str, Any]:
    """A prompt counts once, however many choices continue it."""
    prompt = sum(len(r.prompt_ids) for place, r in enumerate(requests) if place % copies == 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
    }


def heading(kind: str, prefix: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


class Usage(BaseModel):
    """Tokens, counted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class ChatMessage(BaseModel):
    """The assistant's text and tool calls."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(BaseModel):
    """One answer of a chat, with `prompt_token_ids`, `token_ids`, `versions`, `prompt_logprobs` where asked for."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatAnswer(BaseModel):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(BaseModel):
    """One completion: text, or with `flat` the arrays `token_ids`, `token_logprobs` and `versions` instead."""

    index: int
    finish_reason: Literal["stop", "length"]
    text: str | None = None
    logprobs: dict[str, Any] | None = None


class CompletionAnswer(BaseModel):
    """A text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ScoreAnswer(BaseModel):
    """Log probabilities, sequence by sequence."""

    logprobs: list[list[float]]


class TokenizeAnswer(BaseModel):
    """How the model reads a text."""

    tokens: list[int]
    count: int


class ModelEntry(BaseModel):
    """A name requests may use."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    """All names requests may use."""

    object: Literal["list"]
    data: list[ModelEntry]


class PolicyAnswer(BaseModel):
    """Version and fingerprint of the weights really served."""

    version: int
    fingerprint: str


class UpdateAnswer(BaseModel):
    """New weights, applied."""

    version: int
    fingerprint: str
    pause_seconds: float


class AdapterVersions(BaseModel):
    """The policy's version, and each adapter's."""

    version: int
    adapters: dict[str, int]


class LimitsAnswer(BaseModel):
    """The engine's limits."""

    max_context: int
    vocabulary: int
    max_top_logprobs: int
    adapters: dict[str, int]
    model: str


class StatsAnswer(BaseModel):
    """Vital signs."""

    running: int
    waiting: int
    capacity: int
    tokens: int


class StatusAnswer(BaseModel):
    """Done."""

    status: Literal["ok"]
