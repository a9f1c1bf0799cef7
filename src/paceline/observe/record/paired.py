"""Compares the rewards of two runs over the same draws, and on the same held-out rows. Runs of one seed draw the same
rows with the same noise, so the luck of the draw is in both and cancels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.observe.record.folder import RunFolder
from paceline.observe.record.layout import EVALUATION, TRAINING

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
    different_rows: int
    """Draws of one number that were of another row: the two runs do not draw alike."""

    @property
    def differences(self) -> NDArray[np.float64]:
        return self.b - self.a


def pair_rewards(one: RunFolder, other: RunFolder) -> Pairs:
    """All draws that both runs have a reward for; whatever became of them, lest a filter chooses who is compared."""
    names = [name for name in one.rollouts.names("env") if name in other.rollouts.names("env")]
    (mine, *columns), (theirs, *others) = (_draws(run, names, TRAINING) for run in (one, other))
    key, left, right = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
    row, step, a, place = (column[left] for column in columns)
    other_row, other_step, b, other_place = (column[right] for column in others)
    same, step = row == other_row, np.maximum(step, other_step)
    order = np.lexsort((key % TICKETS, step))
    order = order[same[order]]
    key, places = key[order], (place[order], other_place[order])
    different_rows = int(np.count_nonzero(~same))
    return Pairs(tuple(names), key // TICKETS, key % TICKETS, step[order], a[order], b[order], places, different_rows)


LEAST_ROWS = 30
"""Held-out rows from which the mean of their differences is near enough to a normal distribution."""


@dataclass(frozen=True, slots=True)
class HeldOutDifference:
    """One evaluation of both runs on the same rows."""

    step: int
    rows: int
    one: float
    other: float
    """Mean rewards."""
    radius: float
    """How far off the difference may be, at this and all other evaluations at once; infinite where rows are too few."""

    @property
    def is_real(self) -> bool:
        return abs(self.other - self.one) > self.radius


def held_out_differences(one: RunFolder, other: RunFolder) -> list[HeldOutDifference]:
    """Every evaluation that both runs made at the same step of their training, each paired by row.

    The rows of all evaluations must not be one sequence: a row that one policy answers better stays so from one
    evaluation to the next, and is not new evidence. So each evaluation is judged alone, at a level that adds up to
    `ALPHA` over all of them.
    """
    names = [name for name in one.rollouts.names("env") if name in other.rollouts.names("env")]
    ours, theirs = (_evaluations(run, names) for run in (one, other))
    found = []
    for step in sorted((ours.keys() & theirs.keys()) - {0}):
        (mine, _, _, rewards, _), (yours, _, _, others, _) = ours[step], theirs[step]
        _, left, right = np.intersect1d(mine, yours, assume_unique=True, return_indices=True)
        if len(left):
            found.append(held_out_difference(step, rewards[left], others[right], len(found) + 1))
    return found


def held_out_difference(
    step: int, one: NDArray[np.float64], other: NDArray[np.float64], look: int
) -> HeldOutDifference:
    """One evaluation from the rewards of its rows in both runs; `look` counts evaluations from 1."""
    level = ALPHA / (look * (look + 1))  # of all looks together: ALPHA
    few = len(one) < LEAST_ROWS or np.count_nonzero(one != other) < LEAST_NONZERO
    wide = NormalDist().inv_cdf(1 - level / 2)
    radius = np.inf if few else wide * float(np.std(other - one, ddof=1)) / math.sqrt(len(one))
    return HeldOutDifference(step, len(one), float(one.mean()), float(other.mean()), radius)


@dataclass(frozen=True, slots=True)
class Verdict(ConfidenceSequence):
    """What is known of both runs by their names."""

    pairs: Pairs
    names: tuple[str, str]
    held_out: list[HeldOutDifference]

    @property
    def band(self) -> str:
        """The difference, and how far off it may be."""
        return self._band(self.mean[-1], self.radius[-1]) if len(self.mean) else ""

    @property
    def sentence(self) -> str:
        seen = len(self.pairs.ticket)
        if not seen:
            return "no draw was made by both"
        if (since := self.decided_after) is not None:
            ahead = self.names[int(self.mean[since - 1] > 0)]
            return f"{ahead} is ahead in training, at 95% since draw {since} of {seen}: {self.band}"
        if np.isinf(self.radius[-1]):
            return f"nothing can be said of training yet: {seen} draws were made by both"
        return f"the difference in training may be chance: {seen} draws, {self.band}"

    @property
    def held_out_sentence(self) -> str:
        """The same of the latest evaluation; empty where there is none."""
        if not self.held_out:
            return ""
        last = self.held_out[-1]
        where = f"{last.rows} held-out rows at step {last.step}"
        band = self._band(last.other - last.one, last.radius)
        if np.isinf(last.radius):
            return f"nothing can be said of {where}, too few of them differ: {band}"
        if not last.is_real:
            return f"the difference on {where} may be chance: {band}"
        return f"{self.names[int(last.other > last.one)]} is ahead on {where}, at 95%: {band}"

    def _band(self, mean: float, radius: float) -> str:
        one, other = self.names
        return f"{other} minus {one} is {mean:+.3f}" + ("" if np.isinf(radius) else f" ± {radius:.3f}")


def verdict(one: RunFolder, other: RunFolder) -> Verdict | None:
    """The comparison of both runs; None as long as they share neither a draw nor an evaluation."""
    pairs, held_out = pair_rewards(one, other), held_out_differences(one, other)
    if not len(pairs.ticket) and not held_out:
        return None
    sequence = confidence_sequence(pairs.differences)
    return Verdict(sequence.mean, sequence.radius, pairs, (one.name, other.name), held_out)


Draws = tuple[NDArray[Any], ...]
"""Of each draw its key (environment and ticket), row, first step, mean reward, and a rollout's number."""


def _draws(run: RunFolder, names: Sequence[str], domain: int) -> Draws:
    return _by_draw(*_scored_rollouts(run, names, domain))


def _evaluations(run: RunFolder, names: Sequence[str]) -> dict[int, Draws]:
    """The draws of each evaluation by its step. The rows of the record are read once for all of them."""
    env, rows, numbers = _scored_rollouts(run, names, EVALUATION)
    order = np.argsort(rows["step"], kind="stable")
    steps, starts = np.unique(rows["step"][order], return_index=True)
    parts = zip(steps.tolist(), np.split(order, starts[1:]), strict=False)
    return {step: _by_draw(env[part], rows[part], numbers[part]) for step, part in parts}


def _scored_rollouts(run: RunFolder, names: Sequence[str], domain: int) -> tuple[NDArray[Any], ...]:
    """The rollouts of these environments that have a reward: place of the environment, row of the record, number."""
    view = run.rollouts.view()
    rows: NDArray[Any] = view.rows
    number = {name: place for place, name in enumerate(names)}
    known = [number.get(name, -1) if kind == "env" else -1 for name, kind in zip(view.names, view.kinds, strict=True)]
    env = np.array(known or [-1], np.int64)[rows["env"]]
    wanted = np.flatnonzero((rows["domain"] == domain) & (env >= 0) & ~np.isnan(rows["reward"]))
    return env[wanted], rows[wanted], wanted


def _by_draw(env: NDArray[Any], rows: NDArray[Any], numbers: NDArray[Any]) -> Draws:
    key, first, inverse, counts = np.unique(
        env * TICKETS + rows["ticket"], return_index=True, return_inverse=True, return_counts=True
    )
    reward = np.bincount(inverse, weights=rows["reward"], minlength=len(key)) / counts
    row, at = (rows[column][first].astype(np.int64) for column in ("row", "step"))
    return key, row, at, reward, numbers[first]
