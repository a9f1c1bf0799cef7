"""A second task beside reverse-text, for runs that learn two things at once."""

from collections.abc import Sequence

from paceline.config.env import ReverseText as Config
from paceline.data import Row
from paceline.envs import ReverseText, Split


class SortText(ReverseText):
    """`sort: planet` wants `aelnpt`; graded as reverse-text is, on the same words."""

    def __init__(self) -> None:
        super().__init__(Config())

    def examples(self, split: Split) -> Sequence[Row]:
        words = [row["answer"][::-1] for row in super().examples(split)]
        return [
            {"messages": [{"role": "user", "content": f"sort: {word}"}], "answer": "".join(sorted(word))}
            for word in words
        ]
