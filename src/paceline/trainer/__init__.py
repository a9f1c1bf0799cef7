"""Turns batches into gradients, and gradients into policy versions. Knows no algorithm."""

from typing import TYPE_CHECKING

from paceline.errors import TrainerError, TrainerLost
from paceline.trainer.backend import StepReport, Trainer
from paceline.util.lazy_import import lazy_getattr

if TYPE_CHECKING:
    from paceline.trainer.torch.trainer import TorchTrainer

__all__ = ["StepReport", "TorchTrainer", "Trainer", "TrainerError", "TrainerLost"]

__getattr__ = lazy_getattr(__name__, {"torch.trainer": ("TorchTrainer",)})
