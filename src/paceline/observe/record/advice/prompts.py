"""Reduces a rollout to what advisories need of its texts: the prompt, and whether the reply is the expected answer."""

import re
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from paceline.observe.record.rows import message_texts

CUE = r"(?:answer|solution|target|expected|label|hint|ground.?truth)\W{0,8}(?:is\W{1,3})?"
LEAST_TEXT = 2
"""Characters: a shorter text stands in many prompts by chance."""
SHOWN = 40
"""Characters."""
MARKER = re.compile(r"<\|[^|<>\s]{1,30}\|>|</s>|<end_of_turn>")
"""What a chat template writes between messages; in a reply it is a token that should have ended it."""
SEPARATOR = " | "
"""Between the answers that a row accepts, as the record keeps them."""


class PromptFacts(NamedTuple):
    digest: bytes
    """The same for the same messages."""
    token_digest: bytes
    """The same for the same tokens."""
    holds_answer: bool
    """Whether the reply or the expected answer stands in the prompt after a word such as `answer:`."""
    right: tuple[str, str] | None
    """The beginning of the expected answer and of the reply, where they are the same but for case, white space and
    punctuation at the ends."""
    marker: str
    """The first marker of a chat template that the reply spells out."""


def prompt_facts(turns: Sequence[Any], target: str = "") -> PromptFacts | None:
    """Of the turns of a rollout, in a run or from its record; None where no messages were kept."""
    if not turns or not turns[0].messages:
        return None
    prompt, reply = "\n".join(message_texts(turns[0].messages)), str(turns[-1].text)
    answers = [part for part in target.split(SEPARATOR) if part.strip()]
    return PromptFacts(
        _digest(prompt.encode("utf-8", "replace")),
        _digest(array("q", turns[0].prompt_ids).tobytes()),
        any(_follows_cue(prompt, text.strip()) for text in (reply, *answers)),
        next(((a[:SHOWN], reply[:SHOWN]) for a in answers if _bare(reply) and _bare(a) == _bare(reply)), None),
        found[0] if (found := MARKER.search(reply)) else "",
    )


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=12).digest()


def _follows_cue(prompt: str, text: str) -> bool:
    if len(text) < LEAST_TEXT or text not in prompt:
        return False
    return re.search(CUE + re.escape(text) + r"(?!\w)", prompt, re.IGNORECASE) is not None


def _bare(text: str) -> str:
    return "".join(text.casefold().split()).strip(".,;:!?'\"`*")
