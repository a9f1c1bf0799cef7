"""Failing rollouts are dropped one by one, until there are too many: then the run stops and says why."""

from collections import deque

from paceline.config import Breaker as Config
from paceline.errors import PacelineError

MEND = ". Mend that, or let [breaker] allow more"


class RunStopped(PacelineError):
    """The run cannot go on, as a sentence for the user."""


class Breaker:
    """Opens after n failures in a row, or when half of the latest rollouts failed. Names the first cause. What was
    tried again and came to a good end is no failure."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._recent: deque[bool] = deque(maxlen=config.window)
        self._row = 0
        self._first: str | None = None

    def success(self) -> None:
        self._row = 0
        self._recent.append(True)
        if all(self._recent):
            self._first = None

    def failure(self, cause: str) -> None:
        """Count a failed rollout; raises `RunStopped` when it is one too many."""
        self._row += 1
        self._recent.append(False)
        self._first = self._first or cause
        failed = self._recent.count(False)
        if self._row >= self._config.consecutive:
            raise RunStopped(f"{self._row} rollouts failed in a row; the first cause: {self._first}{MEND}")
        if len(self._recent) == self._config.window and 2 * failed >= self._config.window:
            raise RunStopped(
                f"{failed} of the last {self._config.window} rollouts failed; the first cause: {self._first}{MEND}"
            )
