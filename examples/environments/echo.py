"""An environment of your own: it gives examples and scores replies, and never sees a token."""

from collections.abc import Sequence

import paceline
from paceline.data import Row
from paceline.envs import Split
from paceline.envs.words import words


class Echo(paceline.SingleTurn):
    """Copy a word."""

    def examples(self, split: Split) -> Sequence[Row]:
        """The rows of a split, `train` or `eval`. Each holds the `messages` to reply to, and whatever `score` needs."""
        return [
            {"messages": [{"role": "user", "content": f"copy: {word}"}], "word": word}
            for word in words(split, count=100, seed=0)
        ]

    def score(self, example: Row, reply: paceline.Reply) -> paceline.Outcome:
        """The reward of one reply; further numbers, `solo(reward, length=...)`, are logged."""
        return paceline.Outcome.solo(reply.text == example["word"])
