"""Environments: where examples come from and how an episode is played."""

from typing import Annotated

from pydantic import Field

from paceline.config.env.base import (
    ArenaEnvConfig,
    BaseEnvConfig,
    CustomEnvConfig,
    DatasetEnvConfig,
    LeagueConfig,
    RewardEnvConfig,
)
from paceline.config.env.integrations import ModuleEnvConfig, ReasoningGymConfig, TextArenaConfig, VerifiersConfig
from paceline.config.env.tasks import (
    AlphabetSortConfig,
    ArithmeticConfig,
    CalculatorConfig,
    CodeConfig,
    EqualityConfig,
    GSM8KConfig,
    MathConfig,
    RetrievalConfig,
    ReverseTextConfig,
    TokenInConfig,
)
from paceline.util.lazy_import import renamed_names

__all__ = [
    "AlphabetSortConfig",
    "ArenaEnvConfig",
    "ArithmeticConfig",
    "BaseEnvConfig",
    "CalculatorConfig",
    "CodeConfig",
    "CustomEnvConfig",
    "DatasetEnvConfig",
    "EnvConfig",
    "EqualityConfig",
    "GSM8KConfig",
    "LeagueConfig",
    "MathConfig",
    "ModuleEnvConfig",
    "ReasoningGymConfig",
    "RetrievalConfig",
    "ReverseTextConfig",
    "RewardEnvConfig",
    "TextArenaConfig",
    "TokenInConfig",
    "VerifiersConfig",
]

EnvConfig = Annotated[
    ReverseTextConfig
    | ArithmeticConfig
    | AlphabetSortConfig
    | CalculatorConfig
    | EqualityConfig
    | MathConfig
    | GSM8KConfig
    | CodeConfig
    | RetrievalConfig
    | TokenInConfig
    | ModuleEnvConfig
    | ReasoningGymConfig
    | TextArenaConfig
    | VerifiersConfig
    | ArenaEnvConfig
    | RewardEnvConfig
    | CustomEnvConfig,
    Field(discriminator="type"),
]

__getattr__ = renamed_names(
    __name__, {name.removesuffix("Config"): name for name in __all__ if name.endswith("Config")}
)
