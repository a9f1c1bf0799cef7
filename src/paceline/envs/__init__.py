"""Environments: where examples come from and how an episode is played."""

from paceline.config import env as config
from paceline.envs.arithmetic import Arithmetic
from paceline.envs.base import POLICY, EnvError, Environment, Outcome, SingleTurn, Split
from paceline.envs.custom import FunctionEnvironment, custom_environment
from paceline.envs.reverse_text import ReverseText

__all__ = [
    "POLICY",
    "Arithmetic",
    "EnvError",
    "Environment",
    "FunctionEnvironment",
    "Outcome",
    "ReverseText",
    "SingleTurn",
    "Split",
    "build_environment",
]


def build_environment(c: config.EnvConfig) -> Environment:
    """The environment a section of the run file describes."""
    match c:
        case config.ReverseText():
            return ReverseText(c)
        case config.Arithmetic():
            return Arithmetic(c)
        case config.CustomEnv():
            return custom_environment(c)
