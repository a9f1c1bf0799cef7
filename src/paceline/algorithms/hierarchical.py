"""Group-relative credit over a tree of episodes."""

import numpy as np

from paceline.algorithms.base import Algorithm, broadcast
from paceline.algorithms.grpo import GRPO
from paceline.config.algorithm import GRPO as Flat
from paceline.config.algorithm import Hierarchical as Config
from paceline.rollout import Group, Rollout

Scope = tuple[int | None, str, str, str]


class Hierarchical(Algorithm):
    """GRPO between siblings: reward minus the mean of those who faced the same thing.

    An episode may start others, as a proposer whose question several solvers try. All tries of a group share the root's
    task, so roots are compared across the group. But each try wrote its own question, and a solver of an easy one looks
    good beside a solver of a hard one for no merit; so children are compared only with children of the same parent,
    kind and actor. Where nobody starts other episodes this is GRPO.
    """

    def __init__(self, config: Config) -> None:
        self._siblings = GRPO(Flat(std=config.std, positive_only=config.positive_only))

    def assign(self, group: Group) -> None:
        scopes: dict[Scope, list[Rollout]] = {}
        for rollout in group.rollouts:
            scopes.setdefault(_scope(rollout), []).append(rollout)
        for rollouts in scopes.values():
            rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
            for rollout, advantage in zip(rollouts, self._siblings.credit(rewards), strict=True):
                broadcast(rollout, float(advantage))


def _scope(rollout: Rollout) -> Scope:
    """Seats are named within one try, so the same parent in two tries is two parents."""
    member = rollout.member if rollout.parent else None
    return member, rollout.parent, rollout.kind, rollout.actor
