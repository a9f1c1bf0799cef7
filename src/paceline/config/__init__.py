"""Defines, reads and writes the run file. Imports neither torch nor transformers."""

from paceline.config import algorithm, env, inference, model, trainer
from paceline.config.errors import ConfigError
from paceline.config.filters import ReplayConfig
from paceline.config.load import LoadedConfig, dump, load, schema
from paceline.config.run import (
    BreakerConfig,
    CheckpointConfig,
    ConfigWarning,
    EvalConfig,
    FiltersConfig,
    RecordConfig,
    RecordingConfig,
    RunConfig,
)
from paceline.util.lazy_import import renamed_getattr

__all__ = [
    "BreakerConfig",
    "CheckpointConfig",
    "ConfigError",
    "ConfigWarning",
    "EvalConfig",
    "FiltersConfig",
    "LoadedConfig",
    "RecordConfig",
    "RecordingConfig",
    "ReplayConfig",
    "RunConfig",
    "algorithm",
    "dump",
    "env",
    "inference",
    "load",
    "model",
    "schema",
    "trainer",
]

__getattr__ = renamed_getattr(
    __name__, {name.removesuffix("Config"): name for name in __all__ if name.endswith("Config")}
)
