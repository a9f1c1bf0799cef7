"""Environments: where examples come from and how an episode is played."""

from typing import Annotated

from pydantic import Field

from paceline.config.env.arena import ArenaEnv, League
from paceline.config.env.base import EnvBase
from paceline.config.env.custom import CustomEnv
from paceline.config.env.dataset import DatasetEnv
from paceline.config.env.doors import ModuleEnv, ReasoningGym, TextArena, Verifiers
from paceline.config.env.graded import Code, Math
from paceline.config.env.retrieval import Retrieval
from paceline.config.env.reward import RewardEnv
from paceline.config.env.tasks import GSM8K, AlphabetSort, Calculator, Equality, TokenIn
from paceline.config.env.text import Arithmetic, ReverseText

__all__ = [
    "GSM8K",
    "AlphabetSort",
    "ArenaEnv",
    "Arithmetic",
    "Calculator",
    "Code",
    "CustomEnv",
    "DatasetEnv",
    "EnvBase",
    "EnvConfig",
    "Equality",
    "League",
    "Math",
    "ModuleEnv",
    "ReasoningGym",
    "Retrieval",
    "ReverseText",
    "RewardEnv",
    "TextArena",
    "TokenIn",
    "Verifiers",
]

EnvConfig = Annotated[
    ReverseText
    | Arithmetic
    | AlphabetSort
    | Calculator
    | Equality
    | Math
    | GSM8K
    | Code
    | Retrieval
    | TokenIn
    | ModuleEnv
    | ReasoningGym
    | TextArena
    | Verifiers
    | ArenaEnv
    | RewardEnv
    | CustomEnv,
    Field(discriminator="type"),
]
