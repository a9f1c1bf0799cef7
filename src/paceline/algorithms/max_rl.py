"""Maximum-likelihood reinforcement learning."""

import numpy as np
from numpy.typing import NDArray

from paceline.algorithms.base import RewardCredit, centred


class MaxRL(RewardCredit):
    """(Reward - mean) / mean: the gradient of log(mean reward) instead of the mean reward (arXiv 2602.02710).

    Maximising the log of the success rate is maximum likelihood of success: a question solved once in a hundred tries
    pulls a hundred times harder than under plain policy gradient, and an always-solved one not at all. A group that
    never succeeds has no direction, so it gets zeros, never a division by zero.
    """

    def credit(self, rewards: NDArray) -> NDArray:
        mean = rewards.mean()
        return centred(rewards) / mean if mean > 0 else np.zeros_like(rewards)
