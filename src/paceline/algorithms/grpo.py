"""Group-relative policy optimisation."""

import numpy as np
from numpy.typing import NDArray

from paceline.algorithms.base import RewardCredit, centred
from paceline.config.algorithm import GRPO as Config


class GRPO(RewardCredit):
    """Reward minus the group's mean: the other answers to the same question are the baseline (arXiv 2402.03300).

    The mean includes the rollout itself, which scales the unbiased leave-one-out advantage by (n - 1) / n and changes
    nothing else. Dividing by the group's standard deviation is off by default: it blows up groups that are nearly all
    right or nearly all wrong, and so weights rows by how little they vary (arXiv 2503.20783).
    """

    def __init__(self, config: Config) -> None:
        self._config = config

    def credit(self, rewards: NDArray) -> NDArray:
        advantages = centred(rewards)
        spread = _deviation(rewards, self._config.std)
        if spread > 1e-8:
            advantages = advantages / spread
        return np.maximum(advantages, 0.0) if self._config.positive_only else advantages


def _deviation(rewards: NDArray, kind: str) -> float:
    match kind:
        case "population":
            return float(rewards.std())
        case "sample" if len(rewards) > 1:
            return float(rewards.std(ddof=1))
        case "none":
            return 1.0
    return 0.0
