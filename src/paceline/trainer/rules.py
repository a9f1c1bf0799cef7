"""Explains why a bound held a token back: the comparisons of `terms.py` with the token's numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.config.trainer import REF_KL_TRUST


@dataclass(frozen=True, slots=True)
class Moved:
    """How far the tokens of one sequence have moved, and which way they were pushed."""

    ratio: NDArray
    difference: NDArray
    """In probability."""
    advantages: NDArray
    rl: NDArray
    """Which of them the rl component trains."""

    def sequence_ratio(self) -> float:
        """The geometric mean over the rl tokens."""
        return float(np.exp(np.log(self.ratio[self.rl].astype(np.float64)).mean()))


def held_back(c: config.LossConfig, moved: Moved, left: Mapping[str, NDArray]) -> list[tuple[int, str, str]]:
    """Each token that was held back: its place among these, the component, and the rule."""
    rules = {"rl": lambda at: _rl_rule(c, moved, at), "ref_kl": lambda at: _ref_kl_rule(moved, at)}
    return [(int(at), name, rules[name](at)) for name, where in left.items() for at in np.flatnonzero(where)]


def _rl_rule(c: config.LossConfig, moved: Moved, at: int) -> str:
    ratio, apart, up = float(moved.ratio[at]), float(moved.difference[at]), moved.advantages[at] > 0
    match c:
        case config.DPPOConfig():
            return _dropped(apart, "high" if up else "low", c.high if up else c.low)
        case config.PPOConfig():
            return _clipped("the ratio", ratio, up, c.clip_low, c.clip_high, c.dual_clip)
        case config.GSPOConfig():
            return _clipped("the sequence's ratio", moved.sequence_ratio(), up, c.clip_low, c.clip_high)
        case config.CISPOConfig():
            name = "max_ratio" if ratio > c.max_ratio else "min_ratio"
            return f"the ratio {ratio:.4g} is weighed as {name} = {getattr(c, name):g}; its gradient stays"
        case config.ReinforceConfig():
            return f"the ratio {ratio:.4g} is weighed as max_ratio = {c.max_ratio:g}; its gradient stays"
    return "held back by the run's own loss"


def _dropped(apart: float, name: str, bound: float) -> str:
    way = "rose" if apart > 0 else "fell"
    return f"dropped: its probability already {way} by {abs(apart):.3g}, more than {name} = {bound:g}"


def _clipped(what: str, ratio: float, up: bool, low: float, high: float, dual: float | None = None) -> str:
    if up:
        return f"clipped: {what} {ratio:.4g} is above 1 + clip_high = {1 + high:g}"
    if ratio < 1 - low:
        return f"clipped: {what} {ratio:.4g} is below 1 - clip_low = {1 - low:g}"
    return f"clipped: {what} {ratio:.4g} is above dual_clip = {dual:g}"


def _ref_kl_rule(moved: Moved, at: int) -> str:
    way = "rose" if moved.difference[at] > 0 else "fell"
    return (
        f"dropped: its probability already {way} by more than {REF_KL_TRUST:g} since it was sampled, the way the "
        "teacher pulls"
    )
