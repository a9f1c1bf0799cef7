"""Group-relative credit: GRPO, maximum-likelihood RL, and credit over a tree of episodes."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.algorithms.base import Algorithm, RewardCredit, centred
from paceline.config.algorithm import GroupCreditConfig, GRPOConfig, HierarchicalConfig
from paceline.rollout import Group, Rollout


class MaxRL(RewardCredit):
    """(Reward - mean) / mean: the gradient of log(mean reward) instead of the mean reward (arXiv 2602.02710).

    Maximising the log of the success rate is maximum likelihood of success: a question solved once in a hundred tries
    pulls a hundred times harder than under plain policy gradient, and an always-solved one not at all. A group that
    never succeeds has no direction, so it gets zeros, never a division by zero.
    """

    def credit(self, rewards: NDArray) -> NDArray:
        mean = rewards.mean()
        return centred(rewards) / mean if mean > 0 else np.zeros_like(rewards)


PASS = 0.5


class GRPO(RewardCredit):
    """Reward minus the group's mean: the other answers to the same question are the baseline (arXiv 2402.03300).

    The mean includes the rollout itself, which scales the unbiased leave-one-out advantage by (n - 1) / n and changes
    nothing else. Dividing by the group's standard deviation is off by default: it blows up groups that are nearly all
    right or nearly all wrong, and so weights rows by how little they vary (arXiv 2503.20783).

    `baseline = "batch"` compares with all of the environment's rollouts in the batch instead (REINFORCE++, arXiv
    2501.03262): right for `group_size = 1`, and where rows are alike; elsewhere an easy row's rollouts all look good.
    The batch is known only when it ships, so the credit waits until then, and no group is dropped for having none.

    `length_bonus`: among rollouts that pass, r becomes r (1 + clamp(1 - cost / mean cost of those that pass, 0, 1))
    before centring. Only thrift is paid: the long are not fined, and a wrong answer gains nothing by being short.
    """

    def __init__(self, config: GroupCreditConfig) -> None:
        self._config = config

    def assign(self, group: Group) -> None:
        if self._config.baseline == "group":
            super().assign(group)

    async def finish_batch(self, groups: Sequence[Group]) -> Mapping[str, int]:
        if self._config.baseline == "batch":
            actors: dict[tuple[str, str], list[Rollout]] = {}
            for group in groups:
                for actor, rollouts in group.by_actor().items():
                    # A rollout that trains once more keeps the credit it had among those it was sampled with.
                    new = [r for r in rollouts if all(sample.advantages is None for sample in r.samples)]
                    actors.setdefault(actor, []).extend(new)
            for rollouts in filter(None, actors.values()):
                self.compare(rollouts)
        return Counter()

    def scored_rewards(self, rollouts: Sequence[Rollout]) -> NDArray:
        rewards = super().scored_rewards(rollouts)
        unit = self._config.length_bonus
        if unit is None:
            return rewards
        costs = np.array([r.completion_length if unit == "tokens" else len(r.turns) for r in rollouts], np.float64)
        passed = rewards >= PASS
        if passed.any() and (mean := costs[passed].mean()) > 0:
            rewards[passed] *= 1 + np.clip(1 - costs[passed] / mean, 0, 1)
        return rewards

    def credit(self, rewards: NDArray) -> NDArray:
        advantages = centred(rewards)
        ddof = 1 if self._config.std == "sample" else 0
        if self._config.std != "none" and len(rewards) > ddof:
            std = rewards.std(ddof=ddof)
            if std > 1e-8:
                advantages = advantages / (std + self._config.std_epsilon)
        return np.maximum(advantages, 0.0) if self._config.positive_only else advantages


class Hierarchical(Algorithm):
    """GRPO between siblings: reward minus the mean of those who faced the same thing.

    An episode may start others, as a proposer whose question several solvers try. All tries of a group share the root's
    task, so roots are compared across the group. But each try wrote its own question, and a solver of an easy one looks
    good beside a solver of a hard one for no merit; so children are compared only with children of the same parent,
    kind and actor. Where no episode starts others this is GRPO.
    """

    def __init__(self, config: HierarchicalConfig) -> None:
        self._siblings = GRPO(GRPOConfig(std=config.std, positive_only=config.positive_only))

    def assign(self, group: Group) -> None:
        scopes: dict[tuple, list[Rollout]] = {}
        for rollout in group.rollouts:
            # Seats are named within one try, so the same parent in two tries is two parents.
            member = rollout.member if rollout.parent else None
            scopes.setdefault((member, rollout.parent, rollout.kind, rollout.actor), []).append(rollout)
        for rollouts in scopes.values():
            self._siblings.compare(rollouts)
