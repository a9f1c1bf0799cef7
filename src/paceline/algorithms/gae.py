"""Generalised advantage estimation, for the trainer's critic."""

import numpy as np

from paceline.algorithms.base import Algorithm
from paceline.data import Sample
from paceline.rollout import Group


class GAE(Algorithm):
    """The reward where the rollout ends, and no advantage: the critic makes those (arXiv 1506.02438).

    With a critic's guess V of what is still to come, the trainer computes delta_t = r_t + gamma V_{t+1} - V_t and
    A_t = sum_k (gamma lambda)^k delta_{t+k} over the sampled tokens. Nobody is compared with a group, so rows may be
    played once, and a token is credited for what it changed, not for how its rollout ended.

    A rollout that branched is several samples, and the estimate runs along each of them to its end. So each carries the
    episode's reward on its last sampled token: with none there, a branch would be taught that it led to nothing.
    """

    def assign(self, group: Group) -> None:
        for rollout in group.rollouts:
            rollout.samples = [_paid_at_the_end(sample, rollout.reward or 0.0) for sample in rollout.samples]


def _paid_at_the_end(sample: Sample, reward: float) -> Sample:
    rewards = np.zeros(len(sample), np.float32)
    rewards[np.flatnonzero(sample.loss_mask)[-1:]] = reward
    return sample.with_streams(rewards=rewards)
