"""Defines the algorithm contract: the credit of each rollout, and the loss components that train each token.

Hooks, called in this order in the life of a rollout, and two for the checkpoint:

    stage(environment)    once, first of all: the environment as it is to be played
    begin(context)        once, before anything is played: connect to teachers, look at the rows
    observe(rollout)      when a rollout becomes samples: loss weights for tokens the policy did not sample
    assign(group)         when a group is complete: credit (advantages) for the tokens it did
    finish_batch(groups)  before groups train: what needs the whole batch, or another model's log probabilities
    state() / load()      whatever must survive a restart
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.clients.frozen import FrozenPool
from paceline.config.filters import DEFAULT_HANDLING, FailureHandling
from paceline.config.model import ModelRef
from paceline.data import BadRows, Row, Sample
from paceline.envs import Environment
from paceline.errors import PacelineError
from paceline.rollout import Group, Rollout, SamplingClient

KL_PENALTY = "kl/penalty"
"""The metric of a rollout with what `trainer.kl.how = "reward"` took from its reward."""


def reward_before_kl(rollout: Rollout) -> float:
    """The rollout's reward without the penalty of `trainer.kl.how = "reward"`."""
    return (rollout.reward or 0.0) + rollout.metrics.get(KL_PENALTY, 0.0)


class AlgorithmError(PacelineError):
    """An algorithm that answered with something unusable, as a sentence for the user."""


@dataclass(frozen=True, slots=True)
class AlgorithmContext:
    """The parts of a run that an algorithm may use."""

    env: str
    rows: Sequence[Row]
    """The rows that a ticket's `row` is an index into."""
    client: SamplingClient
    """How the policy speaks: its pool, its renderer, its sampling settings."""
    attach: Callable[[ModelRef], Awaitable[FrozenPool]]
    """Connects to a frozen endpoint, once for all who name it; the run closes it."""
    teacher_failures: FailureHandling = DEFAULT_HANDLING
    """What to do with a sample that a teacher could not score."""
    token_penalty: Callable[[Sample], NDArray] | None = None
    """The part of `KL_PENALTY` that each token of a sample cost; None where the reward holds no KL."""


class Algorithm(ABC):
    """Turns rollouts into trained samples. One instance per environment."""

    frozen_sampler: SamplingClient | None = None
    """Samples in place of the policy, where another model does: its tokens have no ratio and never go stale."""
    bad_rows: BadRows = BadRows()
    """Rows that `begin` found unusable: their draws are dropped."""

    def stage(self, environment: Environment) -> Environment:
        """Wrap or replace the environment, as sft does to play demonstrations. Unchanged by default."""
        return environment

    async def begin(self, context: AlgorithmContext) -> None:  # noqa: B027 - optional by design
        """Connect to whatever is needed; what cannot work is refused here. Nothing by default."""

    def observe(self, rollout: Rollout) -> None:  # noqa: B027 - optional by design
        """Put `ce_weights` on observation tokens of `rollout.samples`. Nothing by default."""

    @abstractmethod
    def assign(self, group: Group) -> None:
        """Put credit on the samples of a complete group."""

    async def finish_batch(self, groups: Sequence[Group]) -> Mapping[str, int]:
        """Finish the samples of this environment's groups, which are about to train: all of a batch's, or with
        `trainer.stream` the part that is there. A sample that cannot be finished is taken out of its rollout; answers
        with how many were, by reason. Groups that are replayed were finished the first time and do not come again.
        Nothing by default."""
        return Counter()

    def state(self) -> dict:
        """State for the checkpoint, as JSON."""
        return {}

    def load(self, state: dict) -> None:  # noqa: B027 - optional by design
        """Back to a checkpoint's state."""


class RewardCredit(Algorithm):
    """Credit from rewards alone: one advantage per rollout, from comparing it with those of the same actor."""

    @abstractmethod
    def credit(self, rewards: NDArray) -> NDArray:
        """Advantages of a group's rollouts from their rewards."""

    def assign(self, group: Group) -> None:
        for rollouts in group.by_actor().values():
            self.compare(rollouts)

    def compare(self, rollouts: Sequence[Rollout]) -> None:
        """Credit rollouts by one another."""
        for rollout, advantage in zip(rollouts, self.credit(self.scored_rewards(rollouts)), strict=True):
            broadcast(rollout, float(advantage))

    def scored_rewards(self, rollouts: Sequence[Rollout]) -> NDArray:
        """The reward that each rollout is taken to have earned."""
        return np.array([rollout.reward for rollout in rollouts], dtype=np.float64)


def centred(rewards: NDArray) -> NDArray:
    """Rewards minus their mean: exactly zero when all are equal, which the mean's rounding alone would not give."""
    return rewards - rewards.mean() if np.ptp(rewards) else np.zeros_like(rewards)


def broadcast(rollout: Rollout, advantage: float) -> None:
    """The same advantage on every token the rollout sampled."""
    rollout.samples = [s.with_streams(advantages=s.loss_mask * np.float32(advantage)) for s in rollout.samples]


def spread(rollout: Rollout, advantages: Iterable[float]) -> None:
    """One advantage per sampled token, over the rollout's samples in order."""
    flat = np.asarray(list(advantages), dtype=np.float32)
    counts = [int(s.loss_mask.sum()) for s in rollout.samples]
    where = f"env `{rollout.env}`, ticket {rollout.ticket.number}"
    if flat.shape != (sum(counts),):
        raise AlgorithmError(
            f"{where}, rollout {rollout.member}: the algorithm gave {len(flat)} advantages for {sum(counts)} sampled "
            "tokens; they must align"
        )
    if not np.isfinite(flat).all():
        raise AlgorithmError(f"{where}: advantages must be finite")
    samples = []
    for sample, count in zip(rollout.samples, counts, strict=True):
        stream = np.zeros(len(sample), np.float32)
        stream[sample.loss_mask], flat = flat[:count], flat[count:]
        samples.append(sample.with_streams(advantages=stream))
    rollout.samples = samples
