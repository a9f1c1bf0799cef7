"""The environment of the chaos run: reversing words, graded in worker processes that can be killed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.config.env import ReverseTextConfig as Words
from paceline.data import Row
from paceline.envs import POLICY, Environment, Outcome, ReverseText, Split
from paceline.envs.workers import Workers
from paceline.rollout import Seat

GRADE = f"{Path(__file__).with_name('chaos_grader.py').resolve()}:grade"


class ChaosEnv(Environment):
    """`reverse: planet` wants `tenalp`."""

    def __init__(self, workers: int = 2, timeout: float = 5.0) -> None:
        self._words = ReverseText(Words())
        self._workers, self._timeout = Workers(workers), timeout

    def examples(self, split: Split) -> Sequence[Row]:
        return self._words.examples(split)

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        reply = await seats[POLICY].chat(example["messages"])
        reward = await self._workers.call(GRADE, [reply.text, example["answer"]], self._timeout)
        return Outcome.solo(float(reward), exact=float(reward == 1.0))
