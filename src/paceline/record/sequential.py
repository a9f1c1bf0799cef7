"""When a difference is real, however often one looks.

A test that is repeated after every step until it likes what it sees tells equals apart: a t-test at 5% in nearly every
second pair. A confidence *sequence* holds at all times at once, so one may look whenever one likes, and stop then. This
is the asymptotic one of Waudby-Smith et al. (2103.06476), by Robbins' normal mixture:

    mean_n +- s_n * sqrt(2 (n r + 1) / (n^2 r) * log(sqrt(n r + 1) / alpha)),   r chosen to be tightest near TIGHTEST

It speaks of the mean so far, which may change as both sides learn.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ALPHA = 0.05
TIGHTEST = 200
"""Differences after which the band is narrowest for its confidence."""
FEWEST, MOVED = 80, 10
"""Nothing is said before so many differences, so many of them not zero: the spread must be known first."""


@dataclass(frozen=True, slots=True)
class Course:
    """The mean of the first n differences, n = 1, 2, ..., and between what it is at all times at once."""

    mean: NDArray[np.float64]
    radius: NDArray[np.float64]
    """Infinite as long as too little was seen."""

    @property
    def real(self) -> int | None:
        """How many differences it took until nothing was left to doubt; None if there is doubt still."""
        found = np.flatnonzero(np.abs(self.mean) > self.radius)
        return int(found[0]) + 1 if len(found) else None


def course(differences: NDArray[np.float64], alpha: float = ALPHA) -> Course:
    """What is known of the mean difference, each time one more was seen."""
    n = np.arange(1, len(differences) + 1, dtype=np.float64)
    mean = np.cumsum(differences) / n
    spread = np.sqrt(np.maximum(np.cumsum(np.square(differences)) / n - np.square(mean), 0.0))
    wide = -2.0 * math.log(alpha)
    r = (wide + math.log(wide) + 1.0) / TIGHTEST
    radius = spread * np.sqrt(2.0 * (n * r + 1.0) / (np.square(n) * r) * np.log(np.sqrt(n * r + 1.0) / alpha))
    early = (n < FEWEST) | (np.cumsum(differences != 0.0) < MOVED)
    return Course(mean, np.where(early, np.inf, radius))
