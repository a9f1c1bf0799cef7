"""Builds engines and trainers with torch."""

import copy
import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.clients.external_engine import ExternalEngine
from paceline.clients.sglang import SglangEngine
from paceline.clients.vllm import LaunchedVllm, VllmEngine, VllmProcess, max_lora_rank
from paceline.config import RunConfig
from paceline.config.secret import read_key
from paceline.engine import EmbeddedEngine
from paceline.engine.base import Grammar
from paceline.engine.sequence import GrammarMatcher
from paceline.errors import PacelineError
from paceline.model import attach_lora, avoid_onednn_on_arm, clone_for_engine, load_model
from paceline.model.background_compile import BackgroundCompile, has_cached_code
from paceline.model.dtypes import dtype_name
from paceline.model.source import resolve
from paceline.model.support import can_varlen
from paceline.runtime.local import share_cores
from paceline.trainer import TorchTrainer
from paceline.trainer.torch.world import join
from paceline.weights.tensors import write_tensors

ADAPTERS = 4
"""Versions of an adapter that vLLM computes side by side: the newest, and those that requests still end with."""
CPU_CACHE_GIB = 2


def external_engine(
    config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, root: Path
) -> ExternalEngine:
    """The engine of another maker that `engine.backend` names. `model` is the policy before any adapter."""
    engine = config.engine
    folder = Path(engine.folder) if engine.folder else root / "weights"
    shared: dict[str, Any] = {
        "folder": folder,
        "verify": engine.verify_weights,
        "capacity": engine.max_running,
        "vocabulary": int(model.config.get_text_config().vocab_size),
    }
    if engine.backend == "vllm":
        shared |= {"tied": _tied_embedding(model), "recompute": engine.on_swap == "recompute"}
    if engine.launch is not None:  # which only vLLM can be
        apart = shared["tied"] and model.device.type == "cpu" and config.model.lora is None
        source = _save_untied(model, tokenizer, folder / "served") if apart else resolve(config.model.name)
        return LaunchedVllm(_process(config, source, model, root), **shared)
    assert engine.base_url is not None
    kind = {"vllm": VllmEngine, "sglang": SglangEngine}[engine.backend]
    return kind(engine.base_url, api_key=read_key(engine.api_key_env, "engine.api_key_env"), **shared)


def _process(config: RunConfig, source: str, model: PreTrainedModel, root: Path) -> VllmProcess:
    engine, launch, lora = config.engine, config.engine.launch, config.model.lora
    assert launch is not None
    arguments = ["--model", source, "--served-model-name", "policy", "--dtype", dtype_name(model.dtype)]
    arguments += ["--max-num-seqs", str(engine.max_running), "--logprobs-mode", "processed_logprobs"]
    arguments += ["--enable-scale-out", "--scheduling-policy", "priority", "--generation-config", "vllm"]
    arguments += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if config.model.tokenizer:
        arguments += ["--tokenizer", resolve(config.model.tokenizer)]
    if engine.max_context is not None:
        arguments += ["--max-model-len", str(engine.max_context)]
    if config.model.trust_remote_code:
        arguments += ["--trust-remote-code"]
    if lora is not None:
        rank = max_lora_rank(max(lora.rank, engine.adapter_rank))
        arguments += ["--enable-lora", "--max-loras", str(ADAPTERS), "--max-lora-rank", str(rank)]
        # With room for an adapter at its output layer, vLLM 0.32 on a CPU fails when it scores beside other requests.
        arguments += ["--lora-target-modules", *_targets(model, lora.targets)]
    settings: dict[str, str] = {}
    if model.device.type == "cpu":
        # Bound to cores, vLLM's threads would hold those the trainer computes on.
        threads = str(engine.threads or 1)
        settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}
        settings["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(engine.cache_gib or CPU_CACHE_GIB)))
    return VllmProcess(
        python=os.path.abspath(launch.python),  # noqa: PTH100 - a link to the interpreter is what makes an environment
        arguments=[*arguments, *launch.args],
        log=root / "vllm.log",
        env={**settings, **launch.env},
        seconds=launch.seconds,
    )


def _targets(model: PreTrainedModel, targets: list[str] | str) -> list[str]:
    """The modules that get an adapter, by the last part of their names."""
    if isinstance(targets, str):
        targets = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
        targets = [name for name in targets if name.rsplit(".", 1)[-1] != "lm_head"]
    return sorted({name.rsplit(".", 1)[-1] for name in targets})


def _tied_embedding(model: PreTrainedModel) -> str | None:
    """The name of the embedding where it is the output layer too."""
    output = model.get_output_embeddings()
    weight = None if output is None else output.weight
    return next((name for name, p in model.named_parameters() if p is weight and "lm_head" not in name), None)


def _save_untied(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """Write the model with an untied output layer: vLLM 0.32 on a CPU packs a tied one, and no reload updates that."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    state = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    head = {"lm_head.weight": model.get_output_embeddings().weight.detach().cpu().clone()}
    write_tensors(state | head, folder / "model.safetensors", {"format": "pt"})
    return str(folder.resolve())


class LoadedTorchModel:
    """A Hugging Face model on a CPU or a GPU."""

    def __init__(self, config: RunConfig) -> None:
        self.device = pick_device(config.device)
        if self.device == "cuda":
            threading.Thread(target=_prepare_kernels, daemon=True).start()
        self.model = load_model(config.model, self.device)
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def engine(
        self, config: RunConfig, grammars: Callable[[Grammar], GrammarMatcher] | None = None, owns_model: bool = False
    ) -> EmbeddedEngine:
        """`owns_model`: no trainer runs beside it, so that it may have the model itself."""
        model = self.model.requires_grad_(False) if owns_model else clone_for_engine(self.model, config.model)
        steps = None if owns_model else config.steps
        return engine_for(model, config, grammars=grammars, steps=steps)

    def trainer(self, config: RunConfig, bad_batches: Path) -> TorchTrainer:
        model = self.model if config.model.lora is None else clone_for_engine(self.model, config.model)
        return torch_trainer(config, attach_lora(model, config.model, config.seed), bad_batches)

    def compute_settings(self) -> AbstractContextManager[object]:
        """Settings of the library that hold while engine and trainer run."""
        return avoid_onednn_on_arm(self.model.dtype)


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
    grammars: Callable[[Grammar], GrammarMatcher] | None = None,
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
    """A background compiler for a part whose `compile` is "auto"; None where that part stays uncompiled.

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
    command = [sys.executable, "-P", "-m", "paceline.runtime.compile_worker"]
    return BackgroundCompile(part, command, spec, GAINS[part])


def pick_device(wanted: str) -> str:
    """`auto` takes the GPU if there is one."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise PacelineError('device = "cuda", but torch sees no GPU here: set device = "cpu" or "auto"')
    return wanted


@dataclass(frozen=True, slots=True)
class LoadedTrainer:
    trainer: TorchTrainer
    model: PreTrainedModel
    parameters: int
    device: str


def build_trainer(config: RunConfig, group: ProcessGroup | None = None) -> LoadedTrainer:
    """Load the run's model and a trainer for it; with a group, one rank of several."""
    model, place = load_rank_model(config, group)
    model = attach_lora(model, config.model, config.seed)
    parameters = sum(p.numel() for p in model.parameters())
    config = share_cores(config, parameters)
    trainer = torch_trainer(config, model, Path(config.runs) / config.name / "dumps", group, place)
    return LoadedTrainer(trainer, model, parameters, place.type)


def join_ranks(config: RunConfig, rank: int, world: int, address: str | None) -> ProcessGroup | None:
    """Wait for the other ranks, if there are any; a GPU is chosen for the calling thread."""
    backend = None if pick_device(config.device) == "cuda" else "gloo"
    return join(rank, world, address, backend) if world > 1 else None


def load_rank_model(config: RunConfig, group: ProcessGroup | None) -> tuple[PreTrainedModel, torch.device]:
    """The run's model, and the device it trains on, with its number, which every thread must know. A model that is to
    be sharded waits in its file, mapped into memory, and comes to the device layer by layer: whole it might not fit."""
    place, parallel = torch.empty(0, device=pick_device(config.device)).device, config.trainer.parallel
    in_parts = group is not None and parallel.shard != "none" and parallel.tensor == 1
    return load_model(config.model, "cpu" if in_parts else place), place


def torch_trainer(
    config: RunConfig,
    model: PreTrainedModel,
    bad_batches: Path | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
) -> TorchTrainer:
    """A trainer of a loaded model, as the run file has it. One of several ranks is not compiled beside its work."""
    return TorchTrainer(
        model,
        config.trainer,
        total_steps=config.steps,
        fp32_head=config.model.fp32_head,
        dumps=bad_batches,
        group=group,
        device=device,
        background=background_compile("trainer", config, model) if group is None else None,
    )
