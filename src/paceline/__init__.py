"""Paceline: reinforcement learning for language models, on a laptop as on a cluster.

    import paceline
    result = paceline.train(paceline.load("examples/quickstart.toml").config)

Names are imported when they are first used, so that `paceline.config` stays free of torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paceline.algorithms import Algorithm
    from paceline.cluster import RunResult, train
    from paceline.config import ConfigError, RunConfig, load
    from paceline.data import Sample, Ticket
    from paceline.envs import Environment, Outcome, SingleTurn
    from paceline.errors import PacelineError
    from paceline.inference import EmbeddedEngine, GenerateRequest
    from paceline.rollout import Group, Reply, Rollout, Seat, Turn
    from paceline.trainer import TorchTrainer

_HOMES = {
    "algorithms": ("Algorithm",),
    "cluster": ("RunResult", "train"),
    "config": ("ConfigError", "RunConfig", "load"),
    "data": ("Sample", "Ticket"),
    "envs": ("Environment", "Outcome", "SingleTurn"),
    "errors": ("PacelineError",),
    "inference": ("EmbeddedEngine", "GenerateRequest"),
    "rollout": ("Group", "Reply", "Rollout", "Seat", "Turn"),
    "trainer": ("TorchTrainer",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Algorithm",
    "ConfigError",
    "EmbeddedEngine",
    "Environment",
    "GenerateRequest",
    "Group",
    "Outcome",
    "PacelineError",
    "Reply",
    "Rollout",
    "RunConfig",
    "RunResult",
    "Sample",
    "Seat",
    "SingleTurn",
    "Ticket",
    "TorchTrainer",
    "Turn",
    "__version__",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module `paceline` has no attribute `{name}`")
    return getattr(importlib.import_module(f"paceline.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
