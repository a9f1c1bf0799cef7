"""Counting tokens, and the fields every answer begins with."""

import time
import uuid
from collections.abc import Iterable
from typing import Any

from paceline.inference.base import GenerateRequest


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
