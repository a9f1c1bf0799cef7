"""Algorithms: one short module each, on one contract."""

from paceline.algorithms.base import Algorithm, AlgorithmError, RewardCredit, broadcast, centred, spread
from paceline.algorithms.constant import Constant
from paceline.algorithms.custom import CreditInputs, CustomCredit, custom_algorithm
from paceline.algorithms.grpo import GRPO
from paceline.algorithms.hierarchical import Hierarchical
from paceline.algorithms.max_rl import MaxRL
from paceline.algorithms.rae import RAE
from paceline.algorithms.reward import Reward
from paceline.config import algorithm as config

__all__ = [
    "GRPO",
    "RAE",
    "Algorithm",
    "AlgorithmError",
    "Constant",
    "CreditInputs",
    "CustomCredit",
    "Hierarchical",
    "MaxRL",
    "Reward",
    "RewardCredit",
    "broadcast",
    "build_algorithm",
    "centred",
    "spread",
]


def build_algorithm(c: config.AlgorithmConfig) -> Algorithm:
    """The algorithm a section of the run file describes."""
    match c:
        case config.GRPO():
            return GRPO(c)
        case config.MaxRL():
            return MaxRL()
        case config.Reward():
            return Reward()
        case config.Constant():
            return Constant(c)
        case config.RAE():
            return RAE(c)
        case config.Hierarchical():
            return Hierarchical(c)
        case config.Custom():
            return custom_algorithm(c)
