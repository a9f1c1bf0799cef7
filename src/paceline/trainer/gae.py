"""Generalised advantage estimation over the tokens the policy chose (arXiv 1506.02438)."""

import numpy as np
from numpy.typing import NDArray

from paceline.data import Sample


def cut(sample: Sample, limit: int) -> Sample:
    """The sample's first tokens. What it earned later it earns where it is cut: most often the whole reward lies on its
    last token, and a critic would learn that long samples are worth nothing."""
    short = sample.truncated_to(limit)
    if short is sample or sample.rewards is None:
        return short
    rewards = sample.rewards[:limit].copy()
    rewards[-1] += sample.rewards[limit:].sum()
    return short.with_streams(rewards=rewards)


def per_action(sample: Sample) -> NDArray:
    """What each sampled token earned: the rewards from it up to the next one, so that none on a tool's answer is lost.

    A sample cut off at its length earns what its rewards say and nothing beyond: running out of room is an outcome.
    """
    actions = sample.loss_mask.nonzero()[0]
    assert sample.rewards is not None
    return np.add.reduceat(sample.rewards.astype(np.float64), actions) if len(actions) else np.zeros(0)


def gae(rewards: NDArray, values: NDArray, gamma: float, lam: float) -> NDArray:
    """A_i = delta_i + gamma * lam * A_(i+1) with delta_i = r_i + gamma * V_(i+1) - V_i, and V = 0 after the end.

    What the policy did not choose, a prompt or a tool's answer, is part of the environment: it takes no time.

    >>> gae(np.array([0.0, 1.0]), np.array([0.5, 0.5]), gamma=1.0, lam=1.0).tolist()
    [0.5, 0.5]
    """
    advantages = np.zeros(len(rewards))
    following, later = 0.0, 0.0
    for i in range(len(rewards) - 1, -1, -1):
        later = rewards[i] + gamma * following - values[i] + gamma * lam * later
        advantages[i], following = later, float(values[i])
    return advantages
