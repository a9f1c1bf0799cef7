"""Builds engine and trainer of one process with torch or mlx, and settles `model.dtype = "auto"` for a run."""

import importlib.util
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from paceline.config import RunConfig
from paceline.config.apple import uses_mlx
from paceline.config.hardware import DTYPES
from paceline.config.model import Dtype
from paceline.config.trainer import TrainerConfig as Section
from paceline.engine.base import Engine, Grammar
from paceline.engine.sequence import GrammarMatcher
from paceline.errors import PacelineError
from paceline.model.dtypes import resolve_dtype
from paceline.observe.monitor import RunDirectory
from paceline.orchestrator.checkpoint import CheckpointError, Checkpoints
from paceline.planner.hardware import with_dtype
from paceline.trainer import Trainer
from paceline.trainer.checkpoint import read_state

if TYPE_CHECKING:
    from paceline.engine.mlx.engine import MlxEngine
    from paceline.runtime.torch_backend import TorchBackend
    from paceline.trainer.mlx.trainer import MlxTrainer


ModelBackend: TypeAlias = "TorchBackend | MlxBackend"
"""A loaded model, from which engines and trainers are made. An engine has a module tree of its own and, under LoRA,
shares the frozen base with the trainer."""


def require_mlx() -> None:
    """Raise a sentence unless mlx is installed."""
    if any(importlib.util.find_spec(name) is None for name in ("mlx", "mlx_lm")):
        raise PacelineError("backend = \"mlx\" needs mlx and mlx-lm: pip install 'paceline[mlx]'")


class MlxBackend:
    """A model of mlx-lm on this machine's unified memory."""

    def __init__(self, config: RunConfig) -> None:
        require_mlx()
        from paceline.model.mlx.loading import load_model, mlx_device

        self.device = mlx_device()
        self.model = load_model(config.model)
        self.parameters = self.model.size

    def engine(
        self, config: RunConfig, grammars: Callable[[Grammar], GrammarMatcher] | None = None, alone: bool = False
    ) -> "MlxEngine":
        from paceline.engine.mlx.engine import MlxEngine

        return MlxEngine(
            self.model,
            config.engine,
            deterministic=config.deterministic,
            lora_targets=config.model.lora.targets if config.model.lora else "all-linear",
            grammars=grammars,
        )

    def external_engine(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, root: Path) -> Engine | None:
        if config.engine.backend != "paceline":
            raise PacelineError(f'engine.backend = "{config.engine.backend}" needs backend = "torch"')
        return None

    def trainer(self, config: RunConfig, dumps: Path) -> "MlxTrainer":
        from paceline.model.mlx.loading import clone_model
        from paceline.model.mlx.lora import attach_lora
        from paceline.trainer.mlx.trainer import MlxTrainer

        model = attach_lora(clone_model(self.model), config.model.lora, config.seed)
        return MlxTrainer(model, config.trainer, total_steps=config.steps, dumps=dumps)

    def at_work(self) -> AbstractContextManager[object]:
        return nullcontext()


def load_backend(config: RunConfig) -> ModelBackend:
    """Load the run's model for what this run computes with."""
    if uses_mlx(config.backend):
        return MlxBackend(config)
    from paceline.runtime.torch_backend import TorchBackend

    return TorchBackend(config)


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
    if checkpoint is None and (resumed := resumed_checkpoint(config)) is not None:
        checkpoint, _ = resumed
    if checkpoint is not None:
        return with_dtype(config, checkpoint_compute_dtype(checkpoint))
    device = device_of(config)
    dtype = resolve_dtype(config.model, device)
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


def resumed_checkpoint(config: RunConfig) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint a run goes on from and its state, where it can be found; restoring the run says why not."""
    if not config.resume:
        return None
    saved = Checkpoints(RunDirectory(Path(config.runs) / config.name).checkpoints, config.checkpoint.keep)
    try:
        return saved.find(config.resume)
    except CheckpointError:
        return None


def device_of(config: RunConfig) -> str:
    """The kind of device that the run computes on."""
    if uses_mlx(config.backend):
        if importlib.util.find_spec("mlx") is None:
            return "mlx-cpu"  # building the model says what to install
        from paceline.model.mlx.loading import mlx_device

        return mlx_device()
    from paceline.runtime.torch_backend import pick_device

    return pick_device(config.device)
