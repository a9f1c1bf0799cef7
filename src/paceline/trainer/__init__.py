"""Batches become gradients, gradients become versions. Knows no algorithm."""

from paceline.trainer.base import StepReport, Trainer, TrainerError, TrainerLost
from paceline.trainer.torch_trainer import TorchTrainer

__all__ = ["StepReport", "TorchTrainer", "Trainer", "TrainerError", "TrainerLost"]
