"""Failure policies: retry, drop or fail, chosen by kind of error in a section of the run file."""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from paceline.config.base import Section

Choice = Literal["retry", "drop", "fail"]
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0


class FailuresConfig(Section):
    """How a failed episode is handled, by kind of error. `retry` plays it again from its beginning, with the same
    noise and after a growing pause, and drops it in the end; `drop` goes on without it; `fail` stops the run at once
    with the cause. `[breaker]` counts what was dropped, and stops a run that loses too much."""

    episode: Choice = "drop"
    """The environment raised an error of its own, or ended an episode with something that is no outcome."""
    timeout: Choice = "drop"
    """An episode took longer than its environment's `timeout`. Every try has all of that time."""
    worker: Choice = "retry"
    """A process the environment computes in died, or what it answered cannot be read."""
    engine: Choice = "retry"
    """No engine could answer: all are gone or full, or what came back cannot be read."""
    request: Choice = "drop"
    """A request that no engine can ever answer, such as one longer than the context."""
    judge: Choice = "retry"
    """A model that grades could not be reached, or gave no grade that can be read."""
    teacher: Choice = "retry"
    """A reference model could not score a sample: it is asked again, and then the sample is dropped."""
    tries: int = Field(default=3, ge=1)
    """How often `retry` tries in all, the first time included."""


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """What follows a failure: another try, `tries` in all; the loss of what failed; the end of the run."""

    choice: Choice = "retry"
    tries: int = 3

    def retries(self, failed: int) -> bool:
        """Whether to try once more after so many failures."""
        return self.choice == "retry" and failed < self.tries

    @staticmethod
    def pause(failed: int) -> float:
        """Seconds before the next try: twice as long each time, up to a limit.

        >>> [FailurePolicy.pause(failed) for failed in (1, 2, 3, 9)]
        [1.0, 2.0, 4.0, 30.0]
        """
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(failed - 1, 10))

    def __str__(self) -> str:
        return f'"retry", {self.tries} tries' if self.choice == "retry" else f'"{self.choice}"'


DEFAULT_POLICY = FailurePolicy()
"""The policy of most kinds of failure."""
