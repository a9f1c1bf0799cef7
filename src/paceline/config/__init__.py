"""The run file: its models, and how it is read and written. Imports neither torch nor transformers."""

from paceline.config import algorithm, env, inference, model, trainer
from paceline.config.errors import ConfigError
from paceline.config.load import Loaded, dump, load, schema
from paceline.config.replay import Replay
from paceline.config.run import Breaker, Checkpoint, ConfigWarning, Eval, Filters, Record, Recording, RunConfig

__all__ = [
    "Breaker",
    "Checkpoint",
    "ConfigError",
    "ConfigWarning",
    "Eval",
    "Filters",
    "Loaded",
    "Record",
    "Recording",
    "Replay",
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
