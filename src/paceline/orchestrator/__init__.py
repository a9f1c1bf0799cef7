"""Orchestrates a run: gate, dispatcher, training loop, evaluation, resume."""

from paceline.errors import RunStopped
from paceline.orchestrator.admission import Breaker
from paceline.orchestrator.checkpoint import CheckpointError, Checkpoints, DamagedCheckpoint
from paceline.orchestrator.episodes import TrainEnv, build_train_envs, open_algorithms
from paceline.orchestrator.gate import Gate
from paceline.orchestrator.kl_reference import KLReferenceModel, token_penalty
from paceline.orchestrator.loop import Orchestrator, OrchestratorParts, RollBack
from paceline.util.deadlines import Clock

__all__ = [
    "Breaker",
    "CheckpointError",
    "Checkpoints",
    "Clock",
    "DamagedCheckpoint",
    "Gate",
    "KLReferenceModel",
    "Orchestrator",
    "OrchestratorParts",
    "RollBack",
    "RunStopped",
    "TrainEnv",
    "build_train_envs",
    "open_algorithms",
    "token_penalty",
]
