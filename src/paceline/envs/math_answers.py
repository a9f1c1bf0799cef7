"""Grades mathematical answers, also where equal ones are written differently."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.config.env.tasks import MathConfig as Config
from paceline.data import Row
from paceline.envs.answers import boxed, last_number, only_number, question_and_answers
from paceline.envs.base import POLICY, EnvError, Environment, Outcome, Split, dataset_rows
from paceline.envs.workers import WorkerFailed, Workers, failure_metrics
from paceline.rollout import Seat

CHECK = f"{Path(__file__).with_name('math_check.py')}:check"


class Math(Environment):
    """The last `\\boxed{}` of a reply, or the whole reply, is compared by math-verify in a worker process.

    Where math-verify reads nothing, numbers are compared: the one in the box, or the last in the reply. Metrics:
    `correct`, `parsed` (there was something to compare), `check_failed` and under it the share of each kind of failure.
    """

    def __init__(self, config: Config, check: str = CHECK) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise EnvError(f'environment `{config.name}` needs math-verify: pip install "paceline[tasks]"')
        self._config = config
        self._check = check
        self._workers = Workers(config.workers, config.memory_mb)

    def examples(self, split: Split) -> Sequence[Row]:
        return dataset_rows(self._config, split, self._row, require=("messages", "answer"))

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        reply = await seats[POLICY].chat(example["messages"])
        return await self.grade(reply.text, example["answer"])

    async def grade(self, text: str, answers: Sequence[str]) -> Outcome:
        """The outcome of a reply. Only one box counts: a reply that boxes every candidate has not answered."""
        box = boxed(text)
        said = text if box is None else f"\\boxed{{{box}}}"
        try:
            found = await self._workers.call(self._check, [said, list(answers)], self._config.check_timeout)
        except WorkerFailed as failed:
            return _outcome(correct=False, parsed=False, failed=failed)
        if found["correct"] or (found["parsed"] and found["gold"]):
            return _outcome(found["correct"], parsed=True)
        number = last_number(text) if box is None else only_number(box)
        same = number is not None and any(number == only_number(answer) for answer in answers)
        return _outcome(same, parsed=found["parsed"] or number is not None)

    def _row(self, row: Row) -> Row:
        return question_and_answers(row, self._config.system)


def _outcome(correct: bool, parsed: bool, failed: WorkerFailed | None = None) -> Outcome:
    return Outcome.solo(float(correct), correct=float(correct), parsed=float(parsed), **failure_metrics(failed))
