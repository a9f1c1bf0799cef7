"""Training and held-out reward part: the rows are learnt, and not what they were to teach."""

from itertools import pairwise

import numpy as np

from paceline.record.advice.advisory import Advisory
from paceline.record.advice.measures import trend
from paceline.record.advice.sight import Sight

EVALUATIONS = 12
"""The last ones that are looked at."""
LEAST = 6


def look(sight: Sight, env: str) -> Advisory | None:
    """A line through the gap (training less held-out) at each evaluation. It must open, training must rise and be
    ahead, and held-out must not rise: one at its ceiling, which training catches up with, is no parting."""
    steps, held_out = sight.series(f"eval/{env}/reward", since=1)
    at, rewards = sight.series(f"reward/{env}/mean", since=1)
    steps, held_out = steps[-EVALUATIONS:], held_out[-EVALUATIONS:]
    if len(steps) < LEAST or not len(at):
        return None
    bounds = np.searchsorted(at, np.r_[steps[0] - (steps[1] - steps[0]), steps], side="right")
    if (np.diff(bounds) == 0).any():
        return None
    training = np.array([rewards[low:high].mean() for low, high in pairwise(bounds)])
    gap, up, other = (trend(steps, ys) for ys in (training - held_out, training, held_out))
    _, spreads = sight.series(f"reward/{env}/std", since=int(steps[0]))
    scale = float(spreads.mean()) if len(spreads) else 0.0
    if gap is None or up is None or other is None or scale <= 0:
        return None
    if (
        not (gap.rises and up.rises and not other.may_rise)
        or min(gap.last, gap.last - gap.first) / scale <= sight.advice.parting
    ):
        return None
    lr = float(sight.get("trainer.optimizer.lr", 1e-5))
    best = int(steps[int(np.argmax(held_out))])
    places = sight.evaluated(env)
    worst = places[np.argsort(sight.rows["reward"][places], kind="stable")]
    knobs = [sight.knob("trainer.optimizer.lr", lr / 2, f"and go back: held-out reward was best at step {best}")]
    if not sight.env(env).get("contamination"):
        knobs.append(sight.env_knob(env, "contamination", True, "rows too close to held-out ones are left out"))
    return Advisory(
        rule="parting",
        env=env,
        title=f"Training reward of `{env}` leaves held-out reward behind",
        seen=f"Since step {int(steps[0])} training went from {up.first:.3f} to {up.last:.3f}, held-out from "
        f"{other.first:.3f} to {other.last:.3f}. Held-out was best at step {best} ({held_out.max():.3f}).",
        sure=f"gap {gap.slope:+.3g} ± {gap.error:.2g} a step, held-out {other.slope:+.2g} ± {other.error:.2g} (least "
        f"squares, errors widened for autocorrelation); {len(steps)} evaluations",
        caution="The reward may also be one that can be had without the task, on rows that training has seen often.",
        steps=(int(steps[0]), int(steps[-1])),
        knobs=knobs,
        rollouts=sight.numbers(worst),
        metrics=[f"reward/{env}/mean", f"eval/{env}/reward"],
    )
