"""Decides whether a run computes with mlx, and refuses settings that need torch."""

import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.config.run import RunConfig
    from paceline.config.trainer import TrainerConfig


BACKEND_VARIABLE = "PACELINE_BACKEND"
"""Environment variable that chooses for all runs whose file leaves it open."""


def uses_mlx(wanted: str) -> bool:
    """Whether `backend` means mlx on this machine."""
    wanted = os.environ.get(BACKEND_VARIABLE) or wanted if wanted == "auto" else wanted
    if wanted not in ("auto", "torch", "mlx"):
        raise PacelineError(f"{BACKEND_VARIABLE}={wanted}: write torch or mlx")
    if wanted != "auto":
        return wanted == "mlx"
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    return apple and importlib.util.find_spec("mlx") is not None


def ignored_settings(config: "RunConfig") -> Iterator[str]:
    """Settings that have no effect in a run file that asks for mlx."""
    if config.backend != "mlx":
        return
    if config.device == "cpu":
        yield 'device = "cpu" has no effect with backend = "mlx", which takes the GPU of its machine: remove it'
    if config.engine.products != "exact":
        yield f'engine.products = "{config.engine.products}" has no effect with backend = "mlx": remove it'
    if config.engine.cache_gib is not None:
        yield 'engine.cache_gib has no effect with backend = "mlx", whose cache grows as it is needed: remove it'


def unsupported_settings(config: "RunConfig") -> Iterator[str]:
    """Settings that need torch."""
    if config.placement != "local":
        yield f'backend = "mlx" computes in one process, and placement = "{config.placement}" in several: change one'
    if config.device == "cuda":
        yield 'device = "cuda" is for torch: leave it out where backend = "mlx"'
    if config.engine.backend != "paceline":
        yield f'engine.backend = "{config.engine.backend}" is fed by a trainer of torch: set backend = "torch"'
    yield from unsupported_trainer_settings(config.trainer)
    if config.engine.cache == "pages":
        yield 'engine.cache = "pages" is torch\'s: leave it out where backend = "mlx"'


def unsupported_trainer_settings(c: "TrainerConfig") -> Iterator[str]:
    """The same of a trainer's own settings."""
    if c.parallel.ranks > 1:
        yield 'trainer.parallel is for several processes of torch: leave it out where backend = "mlx"'
    for name, asked in (("optimizer", c.optimizer.offload), ("kl", c.kl is not None and c.kl.offload)):
        if asked:
            yield f"trainer.{name}.offload has nowhere to move to on a machine with one memory: leave it out with mlx"
