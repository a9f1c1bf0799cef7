"""Compares the rewards of two runs over the same draws. Runs of one seed draw the same rows with the same noise, so the
luck of the draw is in both and cancels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.observe.record.folder import RunFolder
from paceline.observe.record.layout import TRAINING

ALPHA = 0.05
TIGHTEST_AT = 200
"""Differences after which the band is narrowest for its confidence."""
LEAST_DIFFERENCES, LEAST_NONZERO = 80, 10
"""Nothing is said before so many differences, so many of them not zero: the spread must be known first."""


@dataclass(frozen=True, slots=True)
class ConfidenceSequence:
    """The mean of the first n differences, n = 1, 2, ..., and between what it is at all times at once."""

    mean: NDArray[np.float64]
    radius: NDArray[np.float64]
    """Infinite as long as too little was seen."""

    @property
    def decided_after(self) -> int | None:
        """How many differences it took until nothing was left to doubt; None if there is doubt still."""
        found = np.flatnonzero(np.abs(self.mean) > self.radius)
        return int(found[0]) + 1 if len(found) else None


def confidence_sequence(differences: NDArray[np.float64]) -> ConfidenceSequence:
    """The estimate of the mean difference after each further pair."""
    n = np.arange(1, len(differences) + 1, dtype=np.float64)
    mean = np.cumsum(differences) / n
    spread = np.sqrt(np.maximum(np.cumsum(np.square(differences)) / n - np.square(mean), 0.0))
    wide = -2.0 * math.log(ALPHA)
    r = (wide + math.log(wide) + 1.0) / TIGHTEST_AT
    radius = spread * np.sqrt(2.0 * (n * r + 1.0) / (np.square(n) * r) * np.log(np.sqrt(n * r + 1.0) / ALPHA))
    early = (n < LEAST_DIFFERENCES) | (np.cumsum(differences != 0.0) < LEAST_NONZERO)
    return ConfidenceSequence(mean, np.where(early, np.inf, radius))


TICKETS = 1 << 40
"""More draws than any environment makes."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The mean reward of each draw in both runs, in the order in which they came to be known."""

    names: tuple[str, ...]
    """Environments that both have."""
    env: NDArray[np.int64]
    ticket: NDArray[np.int64]
    step: NDArray[np.int64]
    """The later of the two."""
    a: NDArray[np.float64]
    b: NDArray[np.float64]
    places: tuple[NDArray[np.int64], NDArray[np.int64]]
    """A rollout of each, by its number in the run's record."""
    strangers: int
    """Draws of one number that were of another row: the two runs do not draw alike."""

    @property
    def differences(self) -> NDArray[np.float64]:
        return self.b - self.a


def pair_rewards(one: RunFolder, other: RunFolder) -> Pairs:
    """All draws that both runs have a reward for; whatever became of them, lest a filter chooses who is compared."""
    names = [name for name in one.rollouts.names("env") if name in other.rollouts.names("env")]
    (mine, *columns), (theirs, *others) = _draws(one, names), _draws(other, names)
    key, left, right = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
    row, step, a, place = (column[left] for column in columns)
    other_row, other_step, b, other_place = (column[right] for column in others)
    same, step = row == other_row, np.maximum(step, other_step)
    order = np.lexsort((key % TICKETS, step))
    order = order[same[order]]
    key, places = key[order], (place[order], other_place[order])
    strangers = int(np.count_nonzero(~same))
    return Pairs(tuple(names), key // TICKETS, key % TICKETS, step[order], a[order], b[order], places, strangers)


@dataclass(frozen=True, slots=True)
class Verdict(ConfidenceSequence):
    pairs: Pairs

    @property
    def band(self) -> str:
        """The difference, and how far off it may be."""
        return f"b - a {self.mean[-1]:+.3f}" + ("" if np.isinf(self.radius[-1]) else f" ± {self.radius[-1]:.3f}")

    @property
    def sentence(self) -> str:
        seen = len(self.pairs.ticket)
        if self.decided_after is not None:
            ahead = "b" if self.mean[self.decided_after - 1] > 0 else "a"
            return f"{ahead} is ahead: beyond doubt since draw {self.decided_after} of {seen}; {self.band}"
        if np.isinf(self.radius[-1]):
            return f"nothing can be said yet: {seen} draws were made by both"
        return f"the difference may be chance: {seen} draws, {self.band}"


def verdict(one: RunFolder, other: RunFolder) -> Verdict | None:
    """The comparison of both runs; None as long as they share no draw."""
    pairs = pair_rewards(one, other)
    sequence = confidence_sequence(pairs.differences)
    return Verdict(sequence.mean, sequence.radius, pairs) if len(pairs.ticket) else None


def _draws(run: RunFolder, names: Sequence[str]) -> tuple[NDArray[Any], ...]:
    """Of each draw its key (environment and ticket), row, first step, mean reward, and a rollout's number."""
    view = run.rollouts.view()
    rows: NDArray[Any] = view.rows
    number = {name: place for place, name in enumerate(names)}
    known = [number.get(name, -1) if kind == "env" else -1 for name, kind in zip(view.names, view.kinds, strict=True)]
    env = np.array(known or [-1], np.int64)[rows["env"]]
    wanted = np.flatnonzero((rows["domain"] == TRAINING) & (env >= 0) & ~np.isnan(rows["reward"]))
    picked = rows[wanted]
    key, first, inverse, counts = np.unique(
        env[wanted] * TICKETS + picked["ticket"], return_index=True, return_inverse=True, return_counts=True
    )
    reward = np.bincount(inverse, weights=picked["reward"], minlength=len(key)) / counts
    row, step = (picked[column][first].astype(np.int64) for column in ("row", "step"))
    return key, row, step, reward, wanted[first]
