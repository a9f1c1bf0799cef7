"""Entropy that is used up before the task is learnt: a policy that tries nothing new finds nothing new."""

import numpy as np

from paceline.record.advice.advisory import Advisory
from paceline.record.advice.measures import average, trend
from paceline.record.advice.sight import Sight

FEW = 5
"""Steps at either end of the run that are compared."""
LEAST = 15
MASTERED = 0.9
"""Of the way from the lowest to the highest reward: entropy falls by itself when a task is done."""


def look(sight: Sight, env: str) -> Advisory | None:
    """The entropy of the last steps against that of the first, where no environment is mastered or still rises."""
    values = sight.all("entropy")
    if len(values) < LEAST or (start := float(values[:FEW].mean())) <= 0:
        return None
    now = average(values[-FEW:])
    stuck = [name for name in sight.envs if _stuck(sight, name)]
    if now.high >= sight.advice.entropy * start or not stuck or len(stuck) < len(sight.envs):
        return None
    flat = [group for name in stuck for group in sight.groups(name).first[::-1][:4]]
    paid, temperature = float(sight.get("trainer.entropy_coef", 0.0)), float(sight.get("sampling.temperature", 1.0))
    return Advisory(
        rule="entropy",
        title="Entropy has collapsed, and the task is not learnt",
        seen=f"It fell from {start:.3g} in the first {FEW} steps to {now.value:.3g} nats a token, "
        f"{now.value / start:.0%} of it, and rewards stand still: "
        + ", ".join(f"`{name}` at {_reward(sight, name):.3f}" for name in stuck)
        + ".",
        sure=f"last {FEW} steps {now.value:.3g} ± {now.error:.2g}, limit {sight.advice.entropy * start:.2g}; no reward "
        f"rises by as much as a standard error over {sight.trained} steps",
        steps=sight.steps,
        knobs=[
            sight.knob("trainer.entropy_coef", max(1e-3, 2 * paid), "pay for it"),
            sight.knob("sampling.temperature", round(1.2 * temperature, 2), "try more"),
        ],
        rollouts=sight.numbers(flat),
        metrics=["entropy", *(f"reward/{name}/mean" for name in stuck)],
    )


def _stuck(sight: Sight, env: str) -> bool:
    """Rewards stand still and better ones are to be had: somebody got them."""
    steps, rewards = sight.series(f"reward/{env}/mean")
    line = trend(steps, rewards)
    paid = sight.rows["reward"][sight.places(env)]
    if line is None or line.may_rise or not len(paid):
        return False
    low, high = min(0.0, float(paid.min())), max(float(paid.max()), float(np.max(sight.all(f"reward/{env}/mean"))))
    return high <= low or (_reward(sight, env) - low) / (high - low) < MASTERED


def _reward(sight: Sight, env: str) -> float:
    return float(sight.series(f"reward/{env}/mean")[1][-FEW:].mean())
