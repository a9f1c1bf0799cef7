"""The algorithm contract: who gets credit, and which loss each token trains.

Three hooks, called in this order in the life of a rollout, and two for the checkpoint:

    observe(rollout)   when a rollout becomes samples: loss weights for tokens the policy did not sample
    assign(group)      when a group is complete: credit for the tokens it did
    score(samples)     when a batch ships: log probabilities of a reference model
    state() / load()   whatever must survive a restart
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.data import Sample
from paceline.errors import PacelineError
from paceline.rollout import Group, Rollout


class AlgorithmError(PacelineError):
    """An algorithm that answered with something unusable, as a sentence for the user."""


class Algorithm(ABC):
    """Turns rollouts into trained samples. One instance per environment."""

    def observe(self, rollout: Rollout) -> None:  # noqa: B027 - optional by design
        """Put `ce_weights` on observation tokens of `rollout.samples`. Nothing by default."""

    @abstractmethod
    def assign(self, group: Group) -> None:
        """Put credit on the samples of a complete group."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Add reference log probabilities to samples about to ship. Nothing by default."""
        return samples

    def state(self) -> dict:
        """What a checkpoint keeps, as JSON."""
        return {}

    def load(self, state: dict) -> None:  # noqa: B027 - optional by design
        """Back to a checkpoint's state."""


class RewardCredit(Algorithm):
    """The family that needs nothing but rewards: one number per rollout, the same for all its sampled tokens. Rollouts
    are compared with those of the same actor."""

    @abstractmethod
    def credit(self, rewards: NDArray) -> NDArray:
        """Advantages of a group's rollouts from their rewards."""

    def assign(self, group: Group) -> None:
        for rollouts in group.by_actor().values():
            rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
            for rollout, advantage in zip(rollouts, self.credit(rewards), strict=True):
                broadcast(rollout, float(advantage))


def centred(rewards: NDArray) -> NDArray:
    """Rewards minus their mean: exactly zero when all are equal, which the mean's rounding alone would not give."""
    return rewards - rewards.mean() if np.ptp(rewards) else np.zeros_like(rewards)


def broadcast(rollout: Rollout, advantage: float) -> None:
    """The same advantage on every token the rollout sampled."""
    rollout.samples = [s.with_streams(advantages=s.loss_mask * np.float32(advantage)) for s in rollout.samples]


def spread(rollout: Rollout, advantages: Iterable[float]) -> None:
    """One advantage per sampled token, over the rollout's samples in order."""
    flat = np.asarray(list(advantages), dtype=np.float32)
    sampled = sum(int(s.loss_mask.sum()) for s in rollout.samples)
    if flat.shape != (sampled,):
        raise AlgorithmError(
            f"env `{rollout.env}`, ticket {rollout.ticket.number}, rollout {rollout.member}: the algorithm gave "
            f"{len(flat)} advantages for {sampled} sampled tokens; they must align"
        )
    if not np.isfinite(flat).all():
        raise AlgorithmError(f"env `{rollout.env}`, ticket {rollout.ticket.number}: advantages must be finite")
    at = 0
    samples = []
    for sample in rollout.samples:
        stream = np.zeros(len(sample), np.float32)
        count = int(sample.loss_mask.sum())
        stream[sample.loss_mask] = flat[at : at + count]
        samples.append(sample.with_streams(advantages=stream))
        at += count
    rollout.samples = samples
