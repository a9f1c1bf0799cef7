"""A credit function and three environments that the examples beside this file name by import path."""

import random
from collections.abc import Mapping, Sequence

import paceline
from paceline.algorithms import CreditInputs
from paceline.config.env import ReverseTextConfig as Config
from paceline.data import Row
from paceline.envs import ReverseText, Split
from paceline.envs.reverse_text import position_accuracy
from paceline.rollout import Message, Seat


def late_letters(inputs: CreditInputs, factor: float) -> list[list[float]]:
    """Credit for a custom algorithm: distance from the mean, and `factor` times that for the second half of a reply."""
    mean = sum(inputs.rewards) / len(inputs.rewards)
    return [
        [(reward - mean) * (factor if at >= length // 2 else 1.0) for at in range(length)]
        for reward, length in zip(inputs.rewards, inputs.completion_lengths, strict=True)
    ]


class OnlyRight(ReverseText):
    """Reversing words, where a wrong try is dropped in training and teaches nothing."""

    def __init__(self) -> None:
        super().__init__(Config())

    async def assign(self, example: Row, draw: int, dice: random.Random) -> Row:
        """Only rows of training come by here."""
        return example | {"training": True}

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> paceline.Outcome | None:
        outcome = await super().play(example, seats)
        right = outcome is not None and outcome.metrics["exact"]
        return outcome if right or "training" not in example else None


class Shown(ReverseText):
    """Practice in using what one is shown: the reply to repeat stands before a question it has nothing to do with. So
    nothing is learnt here of how the question would be answered."""

    def __init__(self) -> None:
        super().__init__(Config())

    def examples(self, split: Split) -> Sequence[Row]:
        rows = list(super().examples(split)) if split == "train" else []
        others = [*rows[1:], *rows[:1]]
        return [{"messages": _shown(a["messages"], b["answer"])} for a, b in zip(rows, others, strict=True)]


def _shown(messages: list[Message], reply: str) -> list[Message]:
    return [{"role": "system", "content": reply}, *messages, {"role": "assistant", "content": reply}]


async def second_look(row: Row, seat: Seat) -> paceline.Outcome:
    """A try, a look at the answer through a tool, and the answer repeated: half of the reward for each reply."""
    word, wanted = row["word"], row["word"][::-1]
    messages = [{"role": "user", "content": f"reverse: {word}"}]
    first = await seat.chat(messages)
    messages += [first.message, {"role": "tool", "content": f"copy: {wanted}"}]
    second = await seat.chat(messages)
    exact = first.text == wanted
    earned = (1.0 if exact else position_accuracy(first.text, wanted) / 2) + position_accuracy(second.text, wanted)
    return paceline.Outcome.solo(earned / 2, exact=float(exact), repeated=float(second.text == wanted))
