"""Records of a run that say what they cost: put in place of `paceline.runtime.session.RolloutRecorder`."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from paceline.data.sample import TokenScores
from paceline.observe.monitor import RunOutcome, RunPlan
from paceline.observe.record import RolloutRecorder
from paceline.trainer.learner import ComputedTokens


class TimedRecorder(RolloutRecorder):
    """Counts what handing over costs the event loop, and what the run costs meanwhile."""

    made: ClassVar[list["TimedRecorder"]] = []

    def __init__(self, run: Path) -> None:
        super().__init__(run)
        self.handing = self.run_cpu = 0.0
        self.made.append(self)
        for name in ("of", "scores"):  # what the trainer hands over for each token
            setattr(ComputedTokens, name, self._timed(getattr(ComputedTokens, name)))

    @property
    def cost(self) -> float:
        """CPU seconds, of the thread that writes, and of the event loop and the trainer that hand over."""
        return self.seconds + self.handing

    def _timed(self, work: Callable) -> Callable:
        def run(*arguments: Any) -> Any:
            begun = time.thread_time()
            try:
                return work(*arguments)
            finally:
                self.handing += time.thread_time() - begun

        return run

    def begin(self, plan: RunPlan) -> None:
        self.run_cpu = -time.process_time()
        super().begin(plan)

    def finished_rollouts(self, step: int, state: str, rollouts: Sequence) -> None:
        begun = time.thread_time()
        super().finished_rollouts(step, state, rollouts)
        self.handing += time.thread_time() - begun

    def token_scores(self, step: int, scores: TokenScores) -> None:
        begun = time.thread_time()
        super().token_scores(step, scores)
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

    def token_scores(self, step: int, scores: TokenScores) -> None:
        if self.kept(step):
            super().token_scores(step, scores)
