"""Settles `model.dtype = "auto"` once for all parts of a run, before any of them starts."""

import importlib.util
import json
import logging
from pathlib import Path

from paceline.config import RunConfig
from paceline.config.apple import on_mlx
from paceline.config.model import Dtype
from paceline.model.dtypes import compute_dtype
from paceline.monitor import RunDirectory
from paceline.orchestrator.checkpoint import CheckpointError, Checkpoints
from paceline.planner.dtypes import DTYPES, with_dtype
from paceline.trainer.files import read_state

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
    from paceline.cluster.torch_kit import pick_device

    return pick_device(config.device)
