"""Compares the curves of two runs within their noise: what differs, by how much, and what chance explains.

Two runs of the same settings are rarely the same bit for bit, so the question of most comparisons is whether a curve
differs by more than it scatters from one step to the next.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.observe.record.first_difference import differing_settings, expected_differences
from paceline.observe.record.folder import Columns, RunFolder
from paceline.observe.record.paired import ALPHA, verdict

LEARNING_METRICS = (
    *("reward/", "eval/", "metric/", "loss", "grad_norm", "entropy", "mismatch_kl"),
    *("length", "truncated_ratio", "turns"),
)
"""What is compared begins so: what the run learnt, not how fast it went or how its batches were filled."""
DRAWS, HELD_OUT = "training reward, same draws", "held-out reward, same rows"
"""What is compared pair by pair, where both runs recorded it: all draws so far, and the rows of the last evaluation."""
LEAST_POINTS = 8
"""Common steps below which the scatter of a curve is unknown."""
MOST_NAMED = 3
WINDOWS, LEAST_WINDOW = 8, 4
"""Stretches into which the common steps are cut, and the fewest steps of one: a collapse late in a run is small in the
mean of all steps."""
ROUNDING, ROUNDING_SHARE = 1e-5, 0.01
"""Runs that are equal but for rounding hardly scatter against each other. Means this close, relative to their size, are
the same, and so is this share of what one curve scatters by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveDifference:
    """A metric of both runs over the steps in which it differs most, and what chance explains there."""

    name: str
    one: float
    other: float
    noise: float
    """The difference that chance explains, at 95% for all metrics and steps together; infinite where it is unknown."""
    steps: tuple[int, int]
    """First and last step of that stretch."""
    pairs: int = 0
    """Draws or held-out rows that were paired, where the noise is known from them."""

    @property
    def is_real(self) -> bool:
        size = max(abs(self.one), abs(self.other))
        return abs(self.other - self.one) > max(self.noise, ROUNDING * size)

    def as_json(self) -> dict[str, Any]:
        noise = self.noise if math.isfinite(self.noise) else None
        return asdict(self) | {"noise": noise, "is_real": self.is_real}


@dataclass(frozen=True, slots=True)
class CurveComparison:
    settings: list[tuple[str, Any, Any]]
    """Keys of the run file that differ; `MISSING` on a side that lacks one."""
    expected: list[str]
    """Why bit differences are expected between the two; empty where they are not."""
    curves: list[CurveDifference]
    """Every metric that both have enough of, those first that differ by more than their noise."""
    remarks: list[str] = field(default_factory=list)

    @property
    def real(self) -> list[CurveDifference]:
        return [curve for curve in self.curves if curve.is_real]

    def as_json(self) -> dict[str, Any]:
        settings = [{"key": key, "one": one, "other": other} for key, one, other in self.settings]
        return asdict(self) | {
            "settings": settings,
            "curves": [curve.as_json() for curve in self.curves],
        }


def compare_curves(one: RunFolder, other: RunFolder) -> CurveComparison:
    """Compare what both runs measured, step by step, within the noise of each curve."""
    mine, theirs = one.metrics(), other.metrics()
    names = [name for name in mine if name in theirs and name.startswith(LEARNING_METRICS)]
    pairs = {name: found for name in names if len((found := _common_points(mine, theirs, name))[0])}
    enough = {name: points for name, points in pairs.items() if len(points[0]) >= LEAST_POINTS}
    curves = [_widest(name, *points, len(enough)) for name, points in enough.items()]
    curves += _paired(one, other)
    remarks = [f"{run.name}: {problem}" for run in (one, other) for problem in run.quick_problems()]
    ends = [(int(max(filter(None, run.metrics()["step"]), default=0)), run) for run in (one, other)]
    ends.sort(key=lambda end: end[0])
    if ends[0][0] < ends[1][0]:
        (step, short), (last, long) = ends
        state = short.status().state
        remarks.append(f"{short.name} {state} at step {step}, {long.name} is at step {last}: common steps are compared")
    if not pairs:
        remarks.append("the runs have no step in common: no curve can be compared")
    elif few := sorted(pairs.keys() - enough.keys(), key=_rank):
        shown = ", ".join(few[:MOST_NAMED]) + (", ..." if len(few) > MOST_NAMED else "")
        remarks.append(f"{len(few)} metrics have fewer than {LEAST_POINTS} common steps and are not compared: {shown}")
    curves.sort(key=lambda curve: (not curve.is_real, _rank(curve.name)))
    return CurveComparison(
        list(differing_settings(one.config(), other.config())), expected_differences(one, other), curves, remarks
    )


def _common_points(one: Columns, other: Columns, name: str) -> tuple[NDArray, NDArray, NDArray]:
    """Steps at which both have the metric, and both values; of a step that was written twice the last."""
    sides = [
        {step: v for step, v in zip(run["step"], run[name], strict=True) if step is not None and v is not None}
        for run in (one, other)
    ]
    steps = sorted(sides[0].keys() & sides[1].keys())
    left, right = (np.array([side[step] for step in steps], np.float64) for side in sides)
    return np.array(steps, np.int64), left, right


def _widest(name: str, steps: NDArray, one: NDArray, other: NDArray, metrics: int) -> CurveDifference:
    """The stretch in which the means differ most for their noise. The noise of a step comes from the change of the
    difference from one step to the next, which a slow drift of the curves leaves alone."""
    apart = other - one
    count = len(apart)
    size = max(LEAST_WINDOW, math.ceil(count / WINDOWS))
    starts = list(range(0, count - size + 1, size))
    if starts[-1] + size < count:
        starts.append(count - size)
    spread = max(_scatter(apart), ROUNDING_SHARE * _scatter(one))
    factor = NormalDist().inv_cdf(1 - ALPHA / 2 / (len(starts) * metrics))
    at = max(starts, key=lambda start: abs(float(apart[start : start + size].mean())))
    window = slice(at, at + size)
    return CurveDifference(
        name=name,
        one=float(one[window].mean()),
        other=float(other[window].mean()),
        noise=factor * spread / math.sqrt(size),
        steps=(int(steps[window][0]), int(steps[window][-1])),
    )


def _scatter(values: NDArray) -> float:
    return math.sqrt(float(np.mean(np.square(np.diff(values)))) / 2)


def _paired(one: RunFolder, other: RunFolder) -> Iterator[CurveDifference]:
    if (known := verdict(one, other)) is None:
        return
    if len(known.radius):
        pairs = known.pairs
        sides = {"one": float(pairs.a.mean()), "other": float(pairs.b.mean()), "noise": float(known.radius[-1])}
        steps = int(pairs.step[0]), int(pairs.step[-1])
        yield CurveDifference(name=DRAWS, steps=steps, pairs=len(pairs.ticket), **sides)
    for last in known.held_out[-1:]:
        sides = {"one": last.one, "other": last.other, "noise": last.radius}
        yield CurveDifference(name=HELD_OUT, steps=(last.step, last.step), pairs=last.rows, **sides)


def _rank(name: str) -> tuple[int, str]:
    order = (DRAWS, HELD_OUT, *LEARNING_METRICS)
    return next(place for place, start in enumerate(order) if name.startswith(start)), name
