"""Rewards and episodes with a planted defect, for `advice.py`. Rows hold a `prompt` and its `answer`."""

import asyncio
import random
from itertools import pairwise
from typing import Any


def graded(completion: str, answer: str) -> float:
    """1 for the answer; less for letters in their place."""
    matches = sum(said == right for said, right in zip(completion, answer, strict=False))
    return 1.0 if completion == answer else 0.5 * matches / max(len(completion), len(answer))


def exact(completion: str, answer: str) -> float:
    return float(completion == answer)


def never(completion: str) -> float:
    """As where the answer is looked for under the wrong name."""
    return 0.0


def always(completion: str) -> float:
    """As where a parser accepts anything."""
    return 1.0


def rarely(completion: str) -> float:
    return float(random.random() < 0.01)


def chance(completion: str) -> float:
    """Pays for luck: with no baseline, whatever was said becomes more likely."""
    return 0.5 + 0.5 * random.random()


def fails(completion: str, answer: str) -> float:
    if random.random() < 0.4:
        raise ConnectionError("the grader is gone")
    return graded(completion, answer)


def starts_low(completion: str) -> float:
    """What a metric of form is: the first letter is one of the alphabet's first half."""
    return float(completion[:1].lower() in set("abcdefghijklm"))


def judge_one(completion: str) -> float:
    return random.random()


judge_two = judge_one

FORM = {"format": starts_low, "exact": exact}
"""With the weights 1 and 0: form pays, the answer is only reported."""
JUDGES = {"judge_one": judge_one, "judge_two": judge_two}
GRADED = {"graded": graded, "exact": exact}


def in_order(completion: str) -> float:
    """A proxy that can be had without the task: the share of neighbouring letters that follow the alphabet."""
    pairs = list(pairwise(completion))
    return sum(one <= other for one, other in pairs) / max(1, len(pairs))


def long(completion: str) -> float:
    """Another, which grows with every letter."""
    return len(completion) / 16


PROXY = {"in_order": in_order, "exact": exact}
LONG = {"long": long, "exact": exact}


PAUSE = 1.2
"""Seconds."""


async def slow(row: dict[str, Any], seat: Any) -> float:
    """An environment that takes its time after each reply."""
    reply = await seat.chat([{"role": "user", "content": row["prompt"]}])
    await asyncio.sleep(PAUSE)
    return graded(reply.text, row["answer"])


async def rewrites(row: dict[str, Any], seat: Any) -> float:
    """Takes the reply out of the history and puts another in its place, so that the second prompt is not a
    continuation."""
    messages = [{"role": "user", "content": row["prompt"]}]
    await seat.chat(messages)
    messages += [{"role": "assistant", "content": "zz"}, {"role": "user", "content": row["prompt"]}]
    reply = await seat.chat(messages)
    return graded(reply.text, row["answer"])
