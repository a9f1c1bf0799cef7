"""Records of a run that say what they cost: put in place of `paceline.runtime.session.RolloutRecorder`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from paceline.observe.monitor import RunOutcome, RunPlan
from paceline.observe.record import RolloutRecorder


class TimedRecorder(RolloutRecorder):
    """Counts what handing over costs the event loop, and what the run costs meanwhile."""

    made: ClassVar[list["TimedRecorder"]] = []

    def __init__(self, run: Path) -> None:
        super().__init__(run)
        self.handing = self.run_cpu = 0.0
        self.made.append(self)

    @property
    def cost(self) -> float:
        """CPU seconds, of the thread that writes and of the event loop that hands over."""
        return self.seconds + self.handing

    def begin(self, plan: RunPlan) -> None:
        self.run_cpu = -time.process_time()
        super().begin(plan)

    def finished_rollouts(self, step: int, state: str, rollouts: Sequence) -> None:
        begun = time.thread_time()
        super().finished_rollouts(step, state, rollouts)
        self.handing += time.thread_time() - begun

    def end(self, outcome: RunOutcome) -> None:
        self.run_cpu += time.process_time()
        super().end(outcome)


class AlternatingRecorder(TimedRecorder):
    """Keeps the rollouts of some steps and leaves out those of the next, in turn."""

    SPELL: ClassVar[int] = 4

    @classmethod
    def kept(cls, step: int) -> bool:
        return step // cls.SPELL % 2 == 0

    def finished_rollouts(self, step: int, state: str, rollouts: Sequence) -> None:
        if self.kept(step):
            super().finished_rollouts(step, state, rollouts)
