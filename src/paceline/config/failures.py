"""What becomes of work that fails, by kind of error."""

from typing import Literal

from pydantic import Field

from paceline.config.base import Section

Choice = Literal["retry", "drop", "fail"]


class Failures(Section):
    """What becomes of an episode that fails, by kind of error. `retry` plays it again from its beginning, with the same
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
