"""Credit by the names self-play code knows it under: each builds one of our algorithms."""

from paceline.algorithms import Algorithm
from paceline.algorithms.constant import Constant
from paceline.algorithms.hierarchical import Hierarchical
from paceline.algorithms.rae import RAE
from paceline.config import algorithm as config


def GRPOCredit(normalize: bool = False, positive_only: bool = False) -> Algorithm:
    """Reward minus the mean of those who played the same thing: tries of one artifact, children of one episode."""
    return Hierarchical(config.Hierarchical(std="population" if normalize else "none", positive_only=positive_only))


def RAECredit(decay: float = 0.95) -> Algorithm:
    """Reward minus a running mean for each actor in each kind of episode."""
    return RAE(config.RAE(decay=decay))


def ConstantCredit(value: float = 1.0) -> Algorithm:
    return Constant(config.Constant(value=value))
