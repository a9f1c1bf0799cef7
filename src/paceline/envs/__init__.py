"""Environments: where examples come from and how an episode is played."""

from collections.abc import Callable, Sequence

from paceline.config import env as config
from paceline.data import Address, Row, register_scheme
from paceline.envs.arithmetic import Arithmetic
from paceline.envs.base import POLICY, EnvError, Environment, JudgeFailed, Outcome, SingleTurn, Split
from paceline.envs.custom import FunctionEnvironment
from paceline.envs.reverse_text import ReverseText
from paceline.importing import import_object

__all__ = [
    "POLICY",
    "Arithmetic",
    "EnvError",
    "Environment",
    "FunctionEnvironment",
    "JudgeFailed",
    "Outcome",
    "ReverseText",
    "SingleTurn",
    "Split",
    "build_environment",
]


BUILDERS: dict[type[config.EnvBase], str] = {
    config.ReverseText: "paceline.envs.reverse_text:ReverseText",
    config.Arithmetic: "paceline.envs.arithmetic:Arithmetic",
    config.AlphabetSort: "paceline.envs.alphabet_sort:AlphabetSort",
    config.Calculator: "paceline.envs.calculator:Calculator",
    config.Equality: "paceline.envs.equality:Equality",
    config.Math: "paceline.envs.math_answers:Math",
    config.GSM8K: "paceline.envs.gsm8k:GSM8K",
    config.Code: "paceline.envs.code:Code",
    config.Retrieval: "paceline.envs.retrieval:Retrieval",
    config.TokenIn: "paceline.envs.token_in:TokenIn",
    config.ModuleEnv: "paceline.envs.module:ModuleEnvironment",
    config.ReasoningGym: "paceline.envs.reasoning_gym:ReasoningGym",
    config.TextArena: "paceline.envs.textarena:TextArena",
    config.Verifiers: "paceline.envs.verifiers:Verifiers",
    config.ArenaEnv: "paceline.arena.environment:arena_environment",
    config.RewardEnv: "paceline.envs.reward:RewardEnvironment",
    config.CustomEnv: "paceline.envs.custom:custom_environment",
}
"""What builds each section's environment, imported only if a run file names it."""


def build_environment(c: config.EnvBase) -> Environment:
    """The environment a section of the run file describes."""
    return import_object(BUILDERS[type(c)])(c)


def _lazily(path: str) -> Callable[[Address], Sequence[Row]]:
    return lambda address: import_object(path)(address)


register_scheme("reasoning-gym", _lazily("paceline.envs.reasoning_gym:reasoning_gym_rows"), ("size", "seed"))
register_scheme("verifiers", _lazily("paceline.envs.verifiers:verifiers_rows"))
