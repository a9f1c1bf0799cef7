"""Environments: where examples come from and how an episode is played."""

from collections.abc import Callable, Sequence

from paceline.config import env as config
from paceline.data import DatasetUri, Row, register_scheme
from paceline.envs.base import POLICY, EnvError, Environment, JudgeFailed, Outcome, SingleTurn, Split
from paceline.envs.custom import FunctionEnvironment
from paceline.envs.reverse_text import Arithmetic, ReverseText
from paceline.util.importing import import_object

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


BUILDERS: dict[type[config.BaseEnvConfig], str] = {
    config.ReverseTextConfig: "paceline.envs.reverse_text:ReverseText",
    config.ArithmeticConfig: "paceline.envs.reverse_text:Arithmetic",
    config.AlphabetSortConfig: "paceline.envs.alphabet_sort:AlphabetSort",
    config.CalculatorConfig: "paceline.envs.calculator:Calculator",
    config.EqualityConfig: "paceline.envs.questions:Equality",
    config.TaggedAnswerConfig: "paceline.envs.questions:TaggedAnswer",
    config.MathConfig: "paceline.envs.questions:Math",
    config.GSM8KConfig: "paceline.envs.gsm8k:GSM8K",
    config.CodeConfig: "paceline.envs.code:Code",
    config.RetrievalConfig: "paceline.envs.retrieval:Retrieval",
    config.TokenInConfig: "paceline.envs.questions:TokenIn",
    config.RemoteEnvConfig: "paceline.envs.remote:Remote",
    config.ModuleEnvConfig: "paceline.envs.custom:ModuleEnvironment",
    config.ReasoningGymConfig: "paceline.envs.reasoning_gym:ReasoningGym",
    config.TextArenaConfig: "paceline.envs.textarena:TextArena",
    config.VerifiersConfig: "paceline.envs.verifiers:verifiers_environment",
    config.ArenaEnvConfig: "paceline.selfplay.environment:arena_environment",
    config.RewardEnvConfig: "paceline.envs.reward:RewardEnvironment",
    config.CustomEnvConfig: "paceline.envs.custom:custom_environment",
}
"""The builder of each section's environment, imported only if a run file names it."""


def build_environment(c: config.BaseEnvConfig) -> Environment:
    """The environment a section of the run file describes."""
    return import_object(BUILDERS[type(c)])(c)


def _lazily(path: str) -> Callable[[DatasetUri], Sequence[Row]]:
    return lambda address: import_object(path)(address)


register_scheme("reasoning-gym", _lazily("paceline.envs.reasoning_gym:reasoning_gym_rows"), ("size", "seed"))
register_scheme("verifiers", _lazily("paceline.envs.verifiers:verifiers_rows"))
