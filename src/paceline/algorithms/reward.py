"""The reward itself."""

from numpy.typing import NDArray

from paceline.algorithms.base import RewardCredit


class Reward(RewardCredit):
    """The raw reward as every token's advantage: REINFORCE (Williams 1992) without a baseline.

    Right where the reward is already centred, such as a win of +1 and a loss of -1; elsewhere its variance is high.
    """

    def credit(self, rewards: NDArray) -> NDArray:
        return rewards
