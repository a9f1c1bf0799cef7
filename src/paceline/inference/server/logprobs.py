"""Log probabilities in OpenAI's two shapes: a list of objects for chats, parallel arrays for completions."""

from typing import Any

from paceline.inference.base import TopLogprobs
from paceline.inference.server.output_processor import ChoiceDelta
from paceline.inference.server.token_bytes import TokenBytes

LOWEST = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot hold."""


def chat_logprobs(delta: ChoiceDelta, lexicon: TokenBytes, count: int) -> dict[str, Any]:
    content = []
    for place, token in enumerate(delta.token_ids):
        ranked = delta.top[place][:count] if count and delta.top else []
        content.append(
            _entry(token, delta.logprobs[place], lexicon)
            | {"top_logprobs": [_entry(other, logprob, lexicon) for other, logprob in ranked]}
        )
    return {"content": content, "refusal": None}


def completion_logprobs(delta: ChoiceDelta, lexicon: TokenBytes, count: int, start: int = 0) -> dict[str, Any]:
    """`start` is where in the answer the text begins: after the prompt, where that is echoed."""
    return {
        "tokens": [lexicon.spell(token)[0] for token in delta.token_ids],
        "token_logprobs": [max(logprob, LOWEST) for logprob in delta.logprobs],
        "top_logprobs": [_ranked(ranked[:count], lexicon) for ranked in delta.top] if count and delta.top else None,
        "text_offset": [start + offset for offset in delta.offsets],
    }


def _entry(token: int, logprob: float, lexicon: TokenBytes) -> dict[str, Any]:
    text, data = lexicon.spell(token)
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": data}


def _ranked(ranked: TopLogprobs, lexicon: TokenBytes) -> dict[str, float]:
    named: dict[str, float] = {}
    for token, logprob in ranked:
        # Two tokens may be spelt alike; the more probable one comes first and stays.
        named.setdefault(lexicon.spell(token)[0], max(logprob, LOWEST))
    return named
