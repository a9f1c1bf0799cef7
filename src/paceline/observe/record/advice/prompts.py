"""Reduces a rollout to what advisories need of its text: which prompt it had, and whether its reply stood in it."""

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from paceline.observe.record.rows import message_texts

CUE = r"(?:answer|solution|target|expected|label|hint|ground.?truth)\W{0,8}(?:is\W{1,3})?"
LEAST_REPLY = 2
"""Characters: a shorter reply stands in many prompts by chance."""


class PromptFacts(NamedTuple):
    digest: bytes
    """The same for the same text."""
    holds_reply: bool
    """Whether the reply stands in the prompt after a word such as `answer:`."""


def prompt_facts(turns: Sequence[Any]) -> PromptFacts | None:
    """Of the turns of a rollout, in a run or from its record; None where no messages were kept."""
    if not turns or not turns[0].messages:
        return None
    prompt, reply = "\n".join(message_texts(turns[0].messages)), str(turns[-1].text).strip()
    digest = blake2b(prompt.encode("utf-8", "replace"), digest_size=12).digest()
    return PromptFacts(digest, len(reply) >= LEAST_REPLY and _is_told(prompt, reply))


def _is_told(prompt: str, reply: str) -> bool:
    return reply in prompt and re.search(CUE + re.escape(reply) + r"(?!\w)", prompt, re.IGNORECASE) is not None
