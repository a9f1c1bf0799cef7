"""The statistics that advisories rest on, each with its error, and the advisory itself."""

import json
import shlex
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

SURE = 3.0
"""Standard errors between a figure and its limit. Twenty rules look at every environment again and again: at two, a
healthy run would hear of something every few looks."""


@dataclass(frozen=True, slots=True)
class Mean:
    value: float
    error: float
    count: int

    @property
    def low(self) -> float:
        return self.value - SURE * self.error

    @property
    def high(self) -> float:
        return self.value + SURE * self.error


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through points."""

    slope: float
    error: float
    first: float
    last: float
    """Where the line begins and ends."""

    @property
    def t(self) -> float:
        if self.error > 0:
            return self.slope / self.error
        return 0.0 if self.slope == 0 else inf if self.slope > 0 else -inf

    @property
    def rises(self) -> bool:
        return self.t > SURE

    @property
    def may_rise(self) -> bool:
        """The data do not rule a rise out."""
        return self.t > 1


def trend(xs: NDArray[Any], ys: NDArray[Any]) -> Trend | None:
    """Least squares, with an error that is wider where neighbours are alike or points are few; None for fewer than
    five."""
    if len(xs) < 5 or np.ptp(xs) == 0:
        return None
    x, y = xs - xs.mean(), ys - ys.mean()
    spread = float(x @ x)
    slope = float(x @ y) / spread
    rest = y - slope * x
    if float(np.abs(rest).max()) <= 1e-9 * max(1.0, float(np.abs(ys).max())):
        rest = np.zeros_like(rest)  # what is left of a straight line is rounding
        slope = slope if abs(slope) * float(np.ptp(xs)) > 1e-9 * max(1.0, float(np.abs(ys).max())) else 0.0
    error = sqrt(float(rest @ rest) / (len(x) - 2) / spread) * _error_inflation(rest, 2)
    at = ys.mean() - slope * xs.mean()
    return Trend(slope, error, float(at + slope * xs[0]), float(at + slope * xs[-1]))


def series_mean(ys: NDArray[Any]) -> Mean:
    """The mean of a series, with an error that is wider where neighbours are alike or values are few."""
    if not len(ys):
        return Mean(0.0, inf, 0)
    error = float(ys.std(ddof=1)) / sqrt(len(ys)) * _error_inflation(ys - ys.mean(), 1) if len(ys) > 1 else inf
    return Mean(float(ys.mean()), error, len(ys))


def _error_inflation(rest: NDArray[Any], fitted: int) -> float:
    """By how much an error grows that was computed as if the residuals of a fit were independent and many.

    Where each takes after the one before it (an AR(1) process of correlation r), n of them are worth
    n (1 - r) / (1 + r). The correlation of few residuals comes out too small, by about (fitted + 2 fitted r) / n (as
    Kendall, 1954, found for the mean), so that is added first. What is left gives the degrees of freedom of Student's
    t, and three of its errors must hold what three of a normal's do.
    """
    count, total = len(rest), float(rest @ rest)
    if total == 0:
        return 1.0
    r = float(rest[1:] @ rest[:-1]) / total
    r = min(0.9, max(0.0, (count * r + fitted) / max(1, count - 2 * fitted)))
    free = max(1.0, count * (1 - r) / (1 + r) - fitted)
    z = SURE  # the quantile of Student's t that is z for a normal, by Cornish and Fisher's expansion
    student = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return sqrt((1 + r) / (1 - r)) * student / SURE


def wilson_share(hits: int, count: int) -> Mean:
    """A share of independent cases, as the centre of Wilson's score interval and what of it is one standard error."""
    if not count:
        return Mean(0.0, inf, 0)
    p, z2 = hits / count, SURE**2
    middle = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = SURE / (1 + z2 / count) * sqrt(p * (1 - p) / count + z2 / (4 * count**2))
    return Mean(middle, half / SURE, count)


def clustered_mean(values: NDArray[Any], groups: NDArray[Any]) -> Mean:
    """A mean over all cases, whose error lets those of one group stand or fall together."""
    if not len(values):
        return Mean(0.0, inf, 0)
    _, place = np.unique(groups, return_inverse=True)
    mean, count = float(values.mean()), int(place.max()) + 1
    if count < 2:
        return Mean(mean, inf, len(values))
    apart = np.bincount(place, values - mean)
    return Mean(mean, sqrt(float(apart @ apart) * count / (count - 1)) / len(values), len(values))


def jackknife(parts: NDArray[Any], of: Any) -> Mean:
    """`of(sums)` where `parts` has one row of sums a group, with the error by leaving each group out once."""
    total, count = parts.sum(axis=0), len(parts)
    value = of(total)
    if count < 2:
        return Mean(value, inf, count)
    left = np.array([of(total - part) for part in parts])
    return Mean(value, sqrt((count - 1) / count * float(((left - left.mean()) ** 2).sum())), count)


MOST_ROLLOUTS = 8
"""Rollouts that are shown as evidence: as many as a reader will open."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A key of the run file to turn."""

    key: str
    """As in `sampling.max_tokens` or `env[0].curriculum`."""
    value: Any
    now: Any
    """None where the run file has none."""
    why: str

    @property
    def text(self) -> str:
        """The value as the run file spells it."""
        return json.dumps(self.value)

    @property
    def flag(self) -> str:
        """The same for a command line."""
        key = self.key.replace("[", ".").replace("]", "")
        return f"--{key} {shlex.quote(self.value if isinstance(self.value, str) else self.text)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advisory:
    """Something a run's figures say against it. Sentences are for the user; `backticks` mark names and keys."""

    rule: str = ""
    """The name of its rule (`AdvisoryName`)."""
    found: float | None = None
    """What was measured, in the units of the limit."""
    limit: float = 0.0
    follows: str = ""
    """The rule of an advisory before it that may be its cause."""
    env: str = ""
    """The environment it speaks of; empty where it is the whole run."""
    title: str
    seen: str
    """What was seen, with numbers."""
    basis: str
    """Which statistic says so, with its error, and how much was looked at."""
    fix: str = ""
    """What to change outside the run file."""
    caution: str = ""
    """What the figures cannot say."""
    steps: tuple[int, int] = (0, 0)
    """The steps looked at; those of the window where a rule gives none."""
    knobs: list[Knob] = field(default_factory=list)
    rollouts: list[int] = field(default_factory=list)
    """Numbers of rollouts in the record that show it, the most telling first."""
    metrics: list[str] = field(default_factory=list)
    """Curves that show it."""

    @property
    def comparison(self) -> str:
        """`found 0.93, limit 0.3`."""
        return "" if self.found is None else f"found {self.found:.3g}, limit {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule measured, also where it lies within its limit."""

    value: float | None = None
    """In the units of the limit; None where nothing could be measured."""
    advisory: Advisory | None = None
    missing: str = ""
    """Why there is no value."""


def unmeasured(what: str) -> Finding:
    return Finding(missing=what)
