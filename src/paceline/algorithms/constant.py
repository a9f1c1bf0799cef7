"""The same credit for everything."""

from paceline.algorithms.base import Algorithm, broadcast
from paceline.config.algorithm import Constant as Config
from paceline.rollout import Group


class Constant(Algorithm):
    """One fixed advantage on every sampled token, whatever the reward.

    At 1.0 the gradient is that of the log likelihood of what was sampled: fine-tuning on one's own rollouts. That is
    right where the environment already chose, by dropping (`None`) the episodes that must not teach.
    """

    def __init__(self, config: Config) -> None:
        self._value = config.value

    def assign(self, group: Group) -> None:
        for rollout in group.rollouts:
            broadcast(rollout, self._value)
