"""Builds engine and trainer of one process, with torch or, on a Mac, mlx.

Settles `model.dtype = "auto"` once for all parts of a run, before any of them starts.
"""

import importlib.util
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from paceline.config import RunConfig
from paceline.config.apple import on_mlx
from paceline.config.hardware import DTYPES
from paceline.config.model import Dtype
from paceline.config.trainer import TrainerConfig as Section
from paceline.engine.base import Engine, Grammar
from paceline.engine.engine import DecodingEngine
from paceline.engine.sequence import Guide
from paceline.model.dtypes import compute_dtype
from paceline.observe.monitor import RunDirectory
from paceline.orchestrator.checkpoint import CheckpointError, Checkpoints
from paceline.planner.hardware import with_dtype
from paceline.trainer import Trainer
from paceline.trainer.checkpoint import read_state


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
        from paceline.runtime.mlx_kit import MlxKit

        return MlxKit(config)
    from paceline.runtime.torch_kit import TorchKit

    return TorchKit(config)


def trainer_of(model: Any, c: Section) -> Trainer:
    """A trainer of a loaded model, by the library that model is of."""
    if type(model).__module__.startswith("paceline.model.mlx"):
        from paceline.trainer.mlx.trainer import MlxTrainer

        return MlxTrainer(model, c)
    from paceline.trainer import TorchTrainer

    return TorchTrainer(model, c)


log = logging.getLogger("paceline.dtypes")


def with_settled_dtype(config: RunConfig, checkpoint: Path | None = None) -> RunConfig:
    """The run file with a definite compute type: that of the checkpoint the run goes on from, else what suits the
    model on this machine. Engine, trainer and record must agree on it, on whichever machines they run."""
    if config.model.dtype != "auto":
        return config
    checkpoint = checkpoint or _resumed(config)
    if checkpoint is not None:
        return with_dtype(config, checkpoint_compute_dtype(checkpoint))
    device = _device(config)
    dtype = compute_dtype(config.model, device)
    if dtype == "float32" and device == "cuda":
        log.warning(
            "`%s` computes in float32, the type of its weights (or this GPU has no bfloat16): %s is several times "
            "faster here",
            config.model.name,
            'model.dtype = "bfloat16"',
        )
    return with_dtype(config, dtype)


def checkpoint_compute_dtype(checkpoint: Path) -> Dtype:
    """The compute type of the run that wrote a checkpoint. Checkpoints that do not name it are from when that was
    float32 unless the run file said otherwise."""
    try:
        written = read_state(checkpoint).get("dtype")
    except (OSError, json.JSONDecodeError):
        written = None  # loading the checkpoint says what is wrong with it
    return DTYPES.get(str(written), "float32")


def _resumed(config: RunConfig) -> Path | None:
    """The checkpoint a run goes on from, where it can be found."""
    if not config.resume:
        return None
    saved = Checkpoints(RunDirectory(Path(config.runs) / config.name).checkpoints, config.checkpoint.keep)
    try:
        return saved.find(config.resume)[0]
    except CheckpointError:
        return None


def _device(config: RunConfig) -> str:
    if on_mlx(config.backend):
        if importlib.util.find_spec("mlx") is None:
            return "mlx-cpu"  # building the model says what to install
        from paceline.model.mlx.loading import mlx_device

        return mlx_device()
    from paceline.runtime.torch_kit import pick_device

    return pick_device(config.device)
