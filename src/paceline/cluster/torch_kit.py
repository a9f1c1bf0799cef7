"""Engine and trainer of torch."""

import json
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
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
from paceline.model.background_compile import BackgroundCompile, has_cached_code
from paceline.model.varlen import can_varlen
from paceline.trainer import TorchTrainer


class TorchKit:
    """A Hugging Face model on a CPU or a GPU."""

    def __init__(self, config: RunConfig) -> None:
        self.device = pick_device(config.device)
        if self.device == "cuda":
            threading.Thread(target=_prepare_kernels, daemon=True).start()
        self.model = load_model(config.model, self.device)
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def ends(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        return end_tokens(tokenizer, self.model)

    def engine(
        self, config: RunConfig, grammars: Callable[[Grammar], Guide] | None = None, alone: bool = False
    ) -> EmbeddedEngine:
        model = self.model.requires_grad_(False) if alone else engine_twin(self.model, config.model)
        steps = None if alone else config.steps
        return engine_for(model, config, grammars=grammars, steps=steps)

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
            background=background_compile("trainer", config, model),
        )

    def at_work(self) -> AbstractContextManager[object]:
        return small_products(self.model.dtype)


def _prepare_kernels() -> None:
    """Seconds of work for the first kernels, done while weights are read: Triton compiles its driver where its cache is
    empty, and code that an earlier run compiled needs the compiler's modules."""
    from triton.runtime import driver

    driver.active.get_current_target()
    if has_cached_code():
        import_module("torch._inductor.compile_fx")


def engine_for(
    model: PreTrainedModel,
    config: RunConfig,
    kind: type[EmbeddedEngine] = EmbeddedEngine,
    grammars: Callable[[Grammar], Guide] | None = None,
    steps: int | None = None,
) -> EmbeddedEngine:
    """An engine of this process that serves the run's model, for so many weight updates if that is known."""
    return kind(
        model,
        config.engine,
        deterministic=config.deterministic,
        fp32_head=config.model.fp32_head,
        lora_targets=config.model.lora.targets if config.model.lora else "all-linear",
        grammars=grammars,
        background=background_compile("engine", config, model),
        steps=steps,
    )


GAINS = {"engine": 0.4, "trainer": 0.2}
"""Share of its time that compiled code saves each part, measured on an H200 at 0.5B."""
COMPILED_IN = {
    "engine": {"adapters", "adapter_rank", "max_running", "prefill_tokens"},
    "trainer": {"stream", "gradient_checkpointing", "kl", "proximal", "entropy_coef"},
}
"""Settings that change what is compiled."""


def background_compile(part: str, config: RunConfig, model: PreTrainedModel) -> BackgroundCompile | None:
    """What makes compiled code for a part whose `compile` is "auto"; None where that part stays uncompiled.

    A deterministic run must not change its arithmetic on the way, and code that came with the model is not at hand in
    another process.
    """
    settings = config.engine if part == "engine" else config.trainer
    if settings.compile != "auto" or model.device.type != "cuda":
        return None
    if config.deterministic or config.model.trust_remote_code:
        return None
    if part == "trainer" and not can_varlen(model, model.device):
        return None  # padded attention is compiled anew for every cut of a batch
    shape = json.loads(model.config.to_json_string(use_diff=False))
    spec = {
        "part": part,
        "device": model.device.index or 0,
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": {key: value for key, value in shape.items() if key != "_name_or_path"},
        "lora": None if config.model.lora is None else config.model.lora.model_dump(),
        "fp32_head": config.model.fp32_head,
        "settings": settings.model_dump(mode="json", include=COMPILED_IN[part]),
    }
    command = [sys.executable, "-P", "-m", "paceline.cluster.compile_worker"]
    return BackgroundCompile(part, command, spec, GAINS[part])


def pick_device(wanted: str) -> str:
    """`auto` takes the GPU if there is one."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise PacelineError('device = "cuda", but torch sees no GPU here: set device = "cpu" or "auto"')
    return wanted
