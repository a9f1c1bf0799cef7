"""Add two small numbers."""

from collections.abc import Sequence

from paceline.config.env import Arithmetic as Config
from paceline.data import Row
from paceline.envs.base import Outcome, SingleTurn, Split
from paceline.envs.words import additions
from paceline.rollout import Reply


class Arithmetic(SingleTurn):
    """`add: 17+25` wants `42`. All or nothing: near misses are still wrong sums."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def examples(self, split: Split) -> Sequence[Row]:
        count = self._config.train_examples if split == "train" else self._config.eval_examples
        return [
            {"messages": [{"role": "user", "content": f"add: {a}+{b}"}], "answer": str(a + b)}
            for a, b in additions(split, count, seed=0)
        ]

    def score(self, example: Row, reply: Reply) -> Outcome:
        exact = float(reply.text.strip() == example["answer"])
        return Outcome.solo(exact, exact=exact)
