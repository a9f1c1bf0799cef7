"""Engine and trainer of torch."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.cluster.backends import foreign
from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.inference import EmbeddedEngine
from paceline.inference.base import Engine, Grammar
from paceline.inference.engine.sequence import Guide
from paceline.model import attach_lora, end_tokens, engine_twin, load_model, small_products
from paceline.trainer import TorchTrainer


class TorchKit:
    """A Hugging Face model on a CPU or a GPU."""

    def __init__(self, config: RunConfig) -> None:
        self.device = pick_device(config.device)
        self.model = load_model(config.model, self.device)
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def ends(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        return end_tokens(tokenizer, self.model)

    def engine(
        self, config: RunConfig, grammars: Callable[[Grammar], Guide] | None = None, alone: bool = False
    ) -> EmbeddedEngine:
        model = self.model.requires_grad_(False) if alone else engine_twin(self.model, config.model)
        return engine_for(model, config, grammars=grammars)

    def foreign(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, root: Path) -> Engine | None:
        return foreign(config, self.model, tokenizer, root)

    def trainer(self, config: RunConfig, dumps: Path) -> TorchTrainer:
        model = self.model if config.model.lora is None else engine_twin(self.model, config.model)
        return TorchTrainer(
            attach_lora(model, config.model, config.seed),
            config.trainer,
            total_steps=config.steps,
            fp32_head=config.model.fp32_head,
            dumps=dumps,
        )

    def at_work(self) -> AbstractContextManager[object]:
        return small_products(self.model.dtype)


def engine_for(
    model: PreTrainedModel,
    config: RunConfig,
    kind: type[EmbeddedEngine] = EmbeddedEngine,
    grammars: Callable[[Grammar], Guide] | None = None,
) -> EmbeddedEngine:
    """An engine of this process that serves the run's model."""
    return kind(
        model,
        config.engine,
        deterministic=config.deterministic,
        fp32_head=config.model.fp32_head,
        lora_targets=config.model.lora.targets if config.model.lora else "all-linear",
        grammars=grammars,
    )


def pick_device(wanted: str) -> str:
    """`auto` takes the GPU if there is one."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise PacelineError('device = "cuda", but torch sees no GPU here: set device = "cpu" or "auto"')
    return wanted
