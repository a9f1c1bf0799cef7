"""Sorts failures by kind, decides what becomes of an episode, and stops a run that loses too many."""

from collections import deque
from collections.abc import Mapping
from typing import Literal, NamedTuple

from paceline.config import BreakerConfig
from paceline.envs.base import JudgeFailed
from paceline.envs.workers import WorkerFailed
from paceline.errors import EngineError, PacelineError, RequestError
from paceline.util.deadlines import DeadlineError
from paceline.util.user_code import UserCodeError, cause_chain, describe_error, full_traceback, user_frames

FIX_HINT = ". Mend that, or let [breaker] allow more"


class RunStopped(PacelineError):
    """The run cannot go on, as a sentence for the user."""


class UserCodeStopped(RunStopped, UserCodeError):
    """The run cannot go on, because user code raised too often."""


def stop_error(text: str, cause: BaseException | None) -> RunStopped:
    """The error that ends a run over a failed episode, raised from what its environment raised."""
    frames = "" if cause is None else user_frames(cause)
    error = UserCodeStopped(text, frames, full_traceback(cause)) if cause is not None and frames else RunStopped(text)
    error.__cause__ = cause
    return error


class FailedRollout(NamedTuple):
    """What the breaker keeps of a rollout that failed."""

    error: str
    where: str
    raised: BaseException | None


class Breaker:
    """Opens after n failures in a row, or when half of the latest rollouts failed. Names the first cause of those that
    count, and the last where that is another. What was tried again and came to a good end is no failure."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._recent: deque[FailedRollout | None] = deque(maxlen=config.window)
        """The latest rollouts, None for those that did not fail."""
        self._consecutive = 0
        self._first: FailedRollout | None = None
        """The first of the failures in a row."""

    def record_success(self) -> None:
        self._consecutive, self._first = 0, None
        self._recent.append(None)

    def record_failure(self, error: str, where: str = "", raised: BaseException | None = None) -> None:
        """Count a failed rollout; raises `RunStopped` when it is one too many."""
        last = FailedRollout(error, where, raised)
        self._consecutive, self._first = self._consecutive + 1, self._first or last
        self._recent.append(last)
        failed, window = [failure for failure in self._recent if failure is not None], self._config.window
        if self._consecutive >= self._config.consecutive:
            text, first = f"{self._consecutive} rollouts failed in a row", self._first
        elif len(self._recent) == window and 2 * len(failed) >= window:
            text, first = f"{len(failed)} of the last {window} rollouts failed", failed[0]
        else:
            return
        other = f"; the last: {last.error}{last.where}" if last.error != first.error else ""
        raise stop_error(f"{text}; the first cause: {first.error}{first.where}{other}{FIX_HINT}", first.raised)


FailureKind = Literal["episode", "timeout", "worker", "engine", "request", "judge"]
KIND_BY_CLASS: Mapping[type[BaseException], FailureKind] = {
    DeadlineError: "timeout",
    JudgeFailed: "judge",
    RequestError: "request",
    EngineError: "engine",
}
"""A request error is an engine error too: the first that fits counts."""


def failure_kind(error: BaseException) -> FailureKind:
    """Of which kind an exception out of an environment is. One that was raised `from` another, or as part of a group,
    is of the kind of what caused it: an engine that is gone is no fault of the code that asked it."""
    kinds = [kind for cause in cause_chain(error) if (kind := _known(cause))]
    return kinds[-1] if kinds else "episode"


def error_text(error: BaseException) -> str:
    """The exception as a user reads it: of a group, whatever went wrong first in it; of our own, the sentence alone."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, WorkerFailed) and error.kind == "exited":
        return f"a worker process {error}"
    if isinstance(error, EngineError | DeadlineError | JudgeFailed):
        return str(error)
    return describe_error(error)


def _known(error: BaseException) -> FailureKind | None:
    if isinstance(error, WorkerFailed):
        return "worker" if error.kind == "exited" else "timeout" if error.kind == "timed_out" else None
    return next((kind for known, kind in KIND_BY_CLASS.items() if isinstance(error, known)), None)
