"""Whether a run computes with mlx, and what it may ask of it."""

import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.config.run import RunConfig


CHOICE = "PACELINE_BACKEND"
"""Environment variable that chooses for all runs whose file leaves it open."""


def on_mlx(wanted: str) -> bool:
    """What `backend` comes to on this machine."""
    wanted = os.environ.get(CHOICE) or wanted if wanted == "auto" else wanted
    if wanted not in ("auto", "torch", "mlx"):
        raise PacelineError(f"{CHOICE}={wanted}: write torch or mlx")
    if wanted != "auto":
        return wanted == "mlx"
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    return apple and importlib.util.find_spec("mlx") is not None


def problems(config: "RunConfig") -> Iterator[str]:
    """What a run file asks of mlx that it cannot do. Where `backend` is left to the machine, that is said when the run
    starts: a run file is checked alike everywhere."""
    if config.backend == "mlx":
        yield from refused(config)


def refused(config: "RunConfig") -> Iterator[str]:
    """What a run asks for that needs torch."""
    if config.placement != "local":
        yield f'backend = "mlx" computes in one process, and placement = "{config.placement}" in several: change one'
    if config.device == "cuda":
        yield 'device = "cuda" is for torch: leave it out where backend = "mlx"'
    if config.engine.backend != "paceline":
        yield f'engine.backend = "{config.engine.backend}" is fed by a trainer of torch: set backend = "torch"'
    if config.trainer.critic is not None:
        yield 'a critic needs backend = "torch"'
    if config.trainer.parallel.ranks > 1:
        yield 'trainer.parallel is for several processes of torch: leave it out where backend = "mlx"'
    if config.trainer.stream or config.trainer.optimizer.offload:
        yield 'trainer.stream and trainer.optimizer.offload need backend = "torch"'
    if config.engine.cache == "pages":
        yield 'engine.cache = "pages" is torch\'s: leave it out where backend = "mlx"'
