"""Engine and trainer disagree about the same weights: the gradient is another policy's than the one that spoke."""

import numpy as np

from paceline.record.advice.advisory import Advisory, Knob
from paceline.record.advice.measures import SURE, average, trend
from paceline.record.advice.sight import Sight

METRIC = "mismatch_kl"
LEAST = 8
GROWN = 5.0
"""Times the value of the run's first quarter."""


def look(sight: Sight, env: str) -> Advisory | None:
    """Its mean over the window lies above the limit; or above a fifth of it, and it grows."""
    steps, values = sight.series(METRIC)
    line = trend(steps, values)
    if len(values) < LEAST or line is None:
        return None
    now, whole = average(values), sight.all(METRIC)
    before = float(whole[: max(LEAST // 2, len(whole) // 4)].mean())
    grows = line.t > SURE and line.last > GROWN * max(0.0, before) and line.last > sight.advice.mismatch / GROWN
    if not grows and now.low <= sight.advice.mismatch:
        return None
    return Advisory(
        rule="mismatch",
        title="Engine and trainer disagree" + (" more and more" if grows else ""),
        seen=f"`{METRIC}` is {now.value:.2g} nats a token, {line.first:.2g} at the beginning of these steps and "
        f"{line.last:.2g} at their end; early in the run it was {before:.2g}.",
        sure=(
            f"slope {line.slope:+.2g} ± {line.error:.1g} a step" if grows else f"mean {now.value:.2g} ± {now.error:.1g}"
        )
        + f" (least squares, errors widened for autocorrelation), limit {sight.advice.mismatch:g}; {len(values)} steps",
        caution="It compares tokens whose weights are the trainer's own, so staleness is no part of it.",
        steps=sight.steps,
        knobs=_knobs(sight),
        rollouts=_longest(sight),
        metrics=[METRIC, "mismatch/numerics", "mismatch/staleness", "mismatch/mask"],
    )


def _knobs(sight: Sight) -> list[Knob]:
    knobs = []
    if not sight.get("model.fp32_head"):
        knobs.append(sight.knob("model.fp32_head", True, "both compute the last layer in float32"))
    if sight.get("engine.on_swap", "keep") == "keep" and sight.get("staleness", 1):
        knobs.append(sight.knob("engine.on_swap", "recompute", "no reply goes on from what older weights computed"))
    return knobs or [sight.knob("model.dtype", "float32", "the same sums in another order differ less")]


def _longest(sight: Sight) -> list[int]:
    """Of the last step: where rounding has had most time to add up."""
    last = np.flatnonzero(
        (sight.rows["step"] == sight.steps[1]) & (sight.rows["state"] == sight.number("state", "trained"))
    )
    return sight.numbers(last[np.argsort(-sight.rows["tokens"][last], kind="stable")])
