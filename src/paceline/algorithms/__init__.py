"""Algorithms: one short module each, on one contract."""

from paceline.algorithms.base import Algorithm, AlgorithmError, RewardCredit, broadcast, centred, spread
from paceline.algorithms.custom import CreditInputs, CustomCredit, custom_algorithm
from paceline.algorithms.grpo import GRPO
from paceline.algorithms.max_rl import MaxRL
from paceline.algorithms.reward import Reward
from paceline.config import algorithm as config

__all__ = [
    "GRPO",
    "Algorithm",
    "AlgorithmError",
    "CreditInputs",
    "CustomCredit",
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
        case config.Custom():
            return custom_algorithm(c)
