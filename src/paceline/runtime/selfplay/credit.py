"""Makes the algorithms that give an arena's actors their credit."""

from paceline.algorithms import Algorithm
from paceline.algorithms.baselines import RAE, Constant
from paceline.algorithms.grpo import Hierarchical
from paceline.config import algorithm as config


def GRPOCredit(normalize: bool = False, positive_only: bool = False) -> Algorithm:
    """Reward minus the mean of those who played the same thing: tries of one artifact, children of one episode."""
    return Hierarchical(
        config.HierarchicalConfig(std="population" if normalize else "none", positive_only=positive_only)
    )


def RAECredit(decay: float = 0.95) -> Algorithm:
    """Reward minus a running mean for each actor in each kind of episode."""
    return RAE(config.RAEConfig(decay=decay))


def ConstantCredit(value: float = 1.0) -> Algorithm:
    """The same advantage for every token, whatever it earned."""
    return Constant(config.ConstantConfig(value=value))
