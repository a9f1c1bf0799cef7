"""Failing rollouts are dropped one by one, until there are too many: then the run stops and says why."""

from collections import deque

from paceline.config import Breaker as Config
from paceline.errors import PacelineError
from paceline.user_code import UserCodeError, user_frames, whole

MEND = ". Mend that, or let [breaker] allow more"


class RunStopped(PacelineError):
    """The run cannot go on, as a sentence for the user."""


class UserCodeStopped(RunStopped, UserCodeError):
    """The run cannot go on, because user code raised too often."""


def stopped(text: str, cause: BaseException | None) -> RunStopped:
    """The error that ends a run over a failed episode, raised from what its environment raised."""
    frames = "" if cause is None else user_frames(cause)
    error = UserCodeStopped(text, frames, whole(cause)) if cause is not None and frames else RunStopped(text)
    error.__cause__ = cause
    return error


class Breaker:
    """Opens after n failures in a row, or when half of the latest rollouts failed. Names the first cause. What was
    tried again and came to a good end is no failure."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._recent: deque[bool] = deque(maxlen=config.window)
        self._row = 0
        self._first: str | None = None
        self._cause: BaseException | None = None

    def success(self) -> None:
        self._row = 0
        self._recent.append(True)
        if all(self._recent):
            self._first = self._cause = None

    def failure(self, cause: str, raised: BaseException | None = None) -> None:
        """Count a failed rollout; raises `RunStopped` when it is one too many."""
        self._row += 1
        self._recent.append(False)
        if self._first is None:
            self._first, self._cause = cause, raised
        failed = self._recent.count(False)
        if self._row >= self._config.consecutive:
            text = f"{self._row} rollouts failed in a row; the first cause: {self._first}{MEND}"
            raise stopped(text, self._cause)
        if len(self._recent) == self._config.window and 2 * failed >= self._config.window:
            text = f"{failed} of the last {self._config.window} rollouts failed; the first cause: {self._first}{MEND}"
            raise stopped(text, self._cause)
