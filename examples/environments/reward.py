"""A reward function of your own, for rows that hold a prompt and an answer."""

from typing import Any


def reward_fn(messages: list[dict[str, Any]], answer: str) -> float:
    """Score a conversation whose last message is the model's reply: a number, higher is better.

    1 for the right answer; otherwise up to 0.5 for letters in their place, so that tries differ and there is something
    to learn from. The function may also be `async`.
    """
    reply = messages[-1]["content"].strip()
    if reply == answer:
        return 1.0
    matches = sum(said == right for said, right in zip(reply, answer, strict=False))
    return 0.5 * matches / max(len(reply), len(answer))
