"""Generated tasks: reverse a made-up word, add two small numbers."""

from collections.abc import Sequence

from paceline.config.env import ArithmeticConfig, ReverseTextConfig
from paceline.data import Row
from paceline.envs.base import Outcome, SingleTurn, Split
from paceline.envs.words import additions, words
from paceline.rollout import Reply


def _row(question: str, answer: str) -> Row:
    return {"messages": [{"role": "user", "content": question}], "answer": answer}


class Arithmetic(SingleTurn):
    """`add: 17+25` wants `42`. All or nothing: near misses are still wrong sums."""

    def __init__(self, config: ArithmeticConfig) -> None:
        self._config = config

    def examples(self, split: Split) -> Sequence[Row]:
        count = self._config.train_examples if split == "train" else self._config.eval_examples
        return [_row(f"add: {a}+{b}", str(a + b)) for a, b in additions(split, count, seed=0)]

    def score(self, example: Row, reply: Reply) -> Outcome:
        exact = float(reply.text.strip() == example["answer"])
        return Outcome.solo(exact, exact=exact)


class ReverseText(SingleTurn):
    """`reverse: planet` wants `tenalp`. Train and eval words differ, and both are absent from the quickstart model's
    pretraining, so a rising score means that the skill was learned and not the words."""

    def __init__(self, config: ReverseTextConfig) -> None:
        self._config = config

    def examples(self, split: Split) -> Sequence[Row]:
        count = self._config.train_examples if split == "train" else self._config.eval_examples
        return [_row(f"reverse: {word}", word[::-1]) for word in words(split, count, seed=0)]

    def score(self, example: Row, reply: Reply) -> Outcome:
        return self.grade(reply.text, example["answer"])

    def grade(self, given: str, wanted: str) -> Outcome:
        exact = given == wanted
        partial = self._config.partial_credit * position_accuracy(given, wanted)
        return Outcome.solo(1.0 if exact else partial, exact=float(exact))


def position_accuracy(given: str, wanted: str) -> float:
    """Share of letters that stand where they should."""
    hits = sum(a == b for a, b in zip(given, wanted, strict=False))
    return hits / max(len(given), len(wanted), 1)
