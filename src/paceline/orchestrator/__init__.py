"""Orchestrates a run: gate, dispatcher, training loop, evaluation, resume."""

from paceline.orchestrator.checkpoint import CheckpointError, Checkpoints, DamagedCheckpoint
from paceline.orchestrator.failures import Breaker, RunStopped
from paceline.orchestrator.gate import Gate
from paceline.orchestrator.loop import Orchestrator, OrchestratorParts, RollBack
from paceline.orchestrator.train_env import TrainEnv, build_train_envs, open_algorithms
from paceline.util.deadlines import Clock

__all__ = [
    "Breaker",
    "CheckpointError",
    "Checkpoints",
    "Clock",
    "DamagedCheckpoint",
    "Gate",
    "Orchestrator",
    "OrchestratorParts",
    "RollBack",
    "RunStopped",
    "TrainEnv",
    "build_train_envs",
    "open_algorithms",
]
