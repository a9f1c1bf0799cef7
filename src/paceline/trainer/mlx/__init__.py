"""Training on Apple silicon. Nothing here needs torch."""

from typing import TYPE_CHECKING

from paceline.util.lazy_import import lazily

if TYPE_CHECKING:
    from paceline.trainer.mlx.trainer import MlxTrainer

__all__ = ["MlxTrainer"]

__getattr__ = lazily(__name__, {"trainer": ("MlxTrainer",)})
