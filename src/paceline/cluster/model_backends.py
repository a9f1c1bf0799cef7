"""Builds engine and trainer of one process, with torch or, on a Mac, mlx."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from paceline.config import RunConfig
from paceline.config.apple import on_mlx
from paceline.config.trainer import TrainerConfig as Section
from paceline.inference.base import Engine, Grammar
from paceline.inference.engine.engine import DecodingEngine
from paceline.inference.engine.sequence import Guide
from paceline.trainer import Trainer


class ModelBackend(Protocol):
    """A loaded model, from which engines and trainers are made. An engine has a module tree of its own and, under LoRA,
    shares the frozen base with the trainer."""

    device: str
    parameters: int

    def ends(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """The tokens that end a turn."""
        ...

    def engine(
        self, config: RunConfig, grammars: Callable[[Grammar], Guide] | None = None, alone: bool = False
    ) -> DecodingEngine:
        """`alone`: no trainer runs beside it, so that it may have the model itself."""
        ...

    def foreign(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, root: Path) -> Engine | None:
        """The engine of another maker that the run file names, fed by this trainer."""
        ...

    def trainer(self, config: RunConfig, dumps: Path) -> Trainer:
        """Of the model itself, with its adapters if the run file asks for some."""
        ...

    def at_work(self) -> AbstractContextManager[object]:
        """Held while engine and trainer run."""
        ...


def kit_of(config: RunConfig) -> ModelBackend:
    """Load the run's model for what this run computes with."""
    if on_mlx(config.backend):
        from paceline.cluster.mlx_kit import MlxKit

        return MlxKit(config)
    from paceline.cluster.torch_kit import TorchKit

    return TorchKit(config)


def trainer_of(model: Any, c: Section) -> Trainer:
    """A trainer of a loaded model, by the library that model is of."""
    if type(model).__module__.startswith("paceline.model.mlx"):
        from paceline.trainer.mlx.trainer import MlxTrainer

        return MlxTrainer(model, c)
    from paceline.trainer import TorchTrainer

    return TorchTrainer(model, c)
