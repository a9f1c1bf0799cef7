"""Paceline: reinforcement learning for language models, on a laptop as on a cluster.

    import paceline

    def score(completion, answer):
        return float(completion.strip() == answer)

    result = paceline.train(model="paceline:quickstart", dataset="sums.jsonl", reward=score, steps=50)
    result.policy.chat("2 + 3 =")

A run file works too: `paceline.train("quickstart", steps=10)`.
Names are imported when they are first used, so that `paceline.config` stays free of torch.
"""

from typing import TYPE_CHECKING

from paceline.util.lazy_import import install_renamed_modules, lazy_getattr

__version__ = "0.1.0"
install_renamed_modules()

if TYPE_CHECKING:
    from paceline.algorithms import Algorithm
    from paceline.api import train
    from paceline.config import ConfigError, RunConfig, load
    from paceline.data import Sample, Ticket
    from paceline.engine import EmbeddedEngine, GenerateRequest
    from paceline.envs import Environment, Outcome, SingleTurn
    from paceline.errors import PacelineError
    from paceline.rollout import Group, Reply, Rollout, Seat, Turn
    from paceline.runtime import RunFailed, RunResult
    from paceline.runtime.saved_policy import Policy, PolicyReply
    from paceline.trainer import TorchTrainer

__all__ = [
    "Algorithm",
    "ConfigError",
    "EmbeddedEngine",
    "Environment",
    "GenerateRequest",
    "Group",
    "Outcome",
    "PacelineError",
    "Policy",
    "PolicyReply",
    "Reply",
    "Rollout",
    "RunConfig",
    "RunFailed",
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


__getattr__ = lazy_getattr(
    __name__,
    {
        "algorithms": ("Algorithm",),
        "api": ("train",),
        "runtime": ("RunFailed", "RunResult"),
        "runtime.saved_policy": ("Policy", "PolicyReply"),
        "config": ("ConfigError", "RunConfig", "load"),
        "data": ("Sample", "Ticket"),
        "envs": ("Environment", "Outcome", "SingleTurn"),
        "errors": ("PacelineError",),
        "engine": ("EmbeddedEngine", "GenerateRequest"),
        "rollout": ("Group", "Reply", "Rollout", "Seat", "Turn"),
        "trainer": ("TorchTrainer",),
    },
)


def __dir__() -> list[str]:
    return __all__
