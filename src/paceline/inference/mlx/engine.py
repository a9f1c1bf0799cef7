"""The engine that runs in this process, with MLX."""

import atexit
import weakref
from collections.abc import Callable

from paceline.config import inference
from paceline.inference.base import Grammar
from paceline.inference.engine.engine import DecodingEngine
from paceline.inference.engine.sequence import Guide
from paceline.inference.mlx.build import build
from paceline.model.mlx.loading import MlxModel


class MlxEngine(DecodingEngine):
    """Serves one of mlx-lm's models from this process."""

    def __init__(
        self,
        model: MlxModel,
        config: inference.Engine,
        *,
        deterministic: bool = False,
        version: int = 0,
        lora_targets: list[str] | str = "all-linear",
        grammars: Callable[[Grammar], Guide] | None = None,
    ) -> None:
        super().__init__(build(model, config, deterministic, version, lora_targets), config, grammars)
        here = weakref.ref(self)
        atexit.register(lambda: (engine := here()) and engine.close())  # mlx aborts a process that leaves it computing
