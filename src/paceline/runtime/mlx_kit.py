"""Builds engine and trainer with mlx."""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from paceline.config import RunConfig
from paceline.engine.base import Engine, Grammar
from paceline.engine.sequence import Guide
from paceline.errors import PacelineError
from paceline.model import end_tokens

if TYPE_CHECKING:
    from paceline.engine.mlx.engine import MlxEngine
    from paceline.trainer.mlx.trainer import MlxTrainer


def require_mlx() -> None:
    """Raise a sentence unless mlx is installed."""
    if any(importlib.util.find_spec(name) is None for name in ("mlx", "mlx_lm")):
        raise PacelineError("backend = \"mlx\" needs mlx and mlx-lm: pip install 'paceline[mlx]'")


class MlxKit:
    """A model of mlx-lm on this machine's unified memory."""

    def __init__(self, config: RunConfig) -> None:
        require_mlx()
        from paceline.model.mlx.loading import load_model, mlx_device

        self.device = mlx_device()
        self.model = load_model(config.model)
        self.parameters = self.model.size

    def ends(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        return end_tokens(tokenizer, self.model)

    def engine(
        self, config: RunConfig, grammars: Callable[[Grammar], Guide] | None = None, alone: bool = False
    ) -> "MlxEngine":
        from paceline.engine.mlx.engine import MlxEngine

        return MlxEngine(
            self.model,
            config.engine,
            deterministic=config.deterministic,
            lora_targets=config.model.lora.targets if config.model.lora else "all-linear",
            grammars=grammars,
        )

    def foreign(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, root: Path) -> Engine | None:
        if config.engine.backend != "paceline":
            raise PacelineError(f'engine.backend = "{config.engine.backend}" needs backend = "torch"')
        return None

    def trainer(self, config: RunConfig, dumps: Path) -> "MlxTrainer":
        from paceline.model.mlx.loading import twin
        from paceline.model.mlx.lora import attach_lora
        from paceline.trainer.mlx.trainer import MlxTrainer

        model = attach_lora(twin(self.model), config.model.lora, config.seed)
        return MlxTrainer(model, config.trainer, total_steps=config.steps, dumps=dumps)

    def at_work(self) -> AbstractContextManager[object]:
        return nullcontext()
