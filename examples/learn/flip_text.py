"""A second task beside reverse-text, for runs that learn two things at once."""

from collections.abc import Sequence

from paceline.config.env import ReverseTextConfig as Config
from paceline.data import Row
from paceline.envs import ReverseText, Split


class FlipText(ReverseText):
    """`flip: planet` wants `tenalp`: the same skill by another name, on words of its own."""

    def __init__(self) -> None:
        super().__init__(Config())

    def examples(self, split: Split) -> Sequence[Row]:
        rows = super().examples(split)
        words = [row["answer"] for row in rows]  # those of reverse-text, read backwards: no word is in both
        return [{"messages": [{"role": "user", "content": f"flip: {word}"}], "answer": word[::-1]} for word in words]
