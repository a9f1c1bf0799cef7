"""Builds what responses share, and their models for the OpenAPI document.

The server builds responses by hand, for speed, so the models are never instantiated.
"""

import time
import uuid
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, create_model

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


def response_head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _response_model(name: str, text: str, /, **fields: Any) -> type[BaseModel]:
    return create_model(name, __doc__=text, **fields)


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


class CompletionChoice(BaseModel):
    """One completion: text, or with `flat` the arrays `token_ids`, `token_logprobs` and `versions` instead."""

    index: int
    finish_reason: Literal["stop", "length"]
    text: str | None = None
    logprobs: dict[str, Any] | None = None


class ModelEntry(BaseModel):
    """A name requests may use."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


_token_counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), int)
_usage_model = _response_model("Usage", "Tokens, counted.", **_token_counts, prompt_tokens_details=dict[str, int])


def _completion_model(name: str, text: str, kind: Any, choices: Any) -> type[BaseModel]:
    return _response_model(name, text, id=str, object=kind, created=int, model=str, choices=choices, usage=_usage_model)


ChatAnswer = _completion_model("ChatAnswer", "A chat completion.", Literal["chat.completion"], list[ChatChoice])
CompletionAnswer = _completion_model(
    "CompletionAnswer", "A text completion.", Literal["text_completion"], list[CompletionChoice]
)
ResponseAnswer = _response_model(
    "ResponseAnswer",
    "A response.",
    id=str,
    object=Literal["response"],
    created_at=int,
    status=Literal["completed", "incomplete"],
    model=str,
    output=list[dict[str, Any]],
    usage=dict[str, Any],
)
ScoreAnswer = _response_model("ScoreAnswer", "Log probabilities, sequence by sequence.", logprobs=list[list[float]])
TokenizeAnswer = _response_model("TokenizeAnswer", "How the model reads a text.", tokens=list[int], count=int)
ModelList = _response_model("ModelList", "All names requests may use.", object=Literal["list"], data=list[ModelEntry])
_policy_fields = {"version": int, "fingerprint": str}
PolicyAnswer = _response_model(
    "PolicyAnswer", "Version and fingerprint of the weights really served.", **_policy_fields
)
UpdateAnswer = _response_model("UpdateAnswer", "New weights, applied.", **_policy_fields, pause_seconds=float)
_adapter_fields = {"adapters": dict[str, int]}
AdapterVersions = _response_model(
    "AdapterVersions", "The policy's version, and each adapter's.", version=int, **_adapter_fields
)
_limit_fields = dict.fromkeys(("max_context", "vocabulary", "max_top_logprobs"), int)
LimitsAnswer = _response_model("LimitsAnswer", "The engine's limits.", **_limit_fields, **_adapter_fields, model=str)
_stats_fields = dict.fromkeys(("running", "waiting", "capacity", "tokens"), int)
StatsAnswer = _response_model("StatsAnswer", "Vital signs.", **_stats_fields)
StatusAnswer = _response_model("StatusAnswer", "Done.", status=Literal["ok"])
