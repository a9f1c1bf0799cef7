"""Engines of other makers for the `local` placement: attached to, or started."""

import copy
import os
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.inference.foreign import ForeignEngine
from paceline.inference.launched import LaunchedVllm, VllmProcess, lora_rank
from paceline.inference.sglang import SglangEngine
from paceline.inference.vllm import VllmEngine
from paceline.model.dtypes import dtype_name
from paceline.model.naming import resolve
from paceline.model.saving import write_tensors

ADAPTERS = 4
"""Versions of an adapter that vLLM computes side by side: the newest, and those that requests still end with."""
CPU_CACHE_GIB = 2


def foreign(
    config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, root: Path
) -> ForeignEngine | None:
    """The engine that `engine.backend` names; None for Paceline's own. `model` is the policy before any adapter."""
    engine = config.engine
    if engine.backend == "paceline":
        return None
    folder = Path(engine.folder) if engine.folder else root / "weights"
    shared: dict[str, Any] = {
        "folder": folder,
        "verify": engine.verify_weights,
        "capacity": engine.max_running,
        "vocabulary": int(model.config.get_text_config().vocab_size),
    }
    if engine.launch is not None:
        shared |= {"tied": _tied(model), "recompute": engine.on_swap == "recompute"}
        apart = shared["tied"] and model.device.type == "cpu" and config.model.lora is None
        source = _untied(model, tokenizer, folder / "served") if apart else resolve(config.model.name)
        return LaunchedVllm(_process(config, source, model, root), **shared)
    assert engine.base_url is not None
    key = _key(engine.api_key_env)
    if engine.backend == "sglang":
        return SglangEngine(engine.base_url, api_key=key, **shared)
    shared |= {"tied": _tied(model), "recompute": engine.on_swap == "recompute"}
    return VllmEngine(engine.base_url, api_key=key, **shared)


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
        rank = lora_rank(max(lora.rank, engine.adapter_rank))
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
        settings={**settings, **launch.env},
        seconds=launch.seconds,
    )


def _targets(model: PreTrainedModel, targets: list[str] | str) -> list[str]:
    """The modules that get an adapter, by the last part of their names."""
    if not isinstance(targets, str):
        return sorted({name.rsplit(".", 1)[-1] for name in targets})
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    return sorted({name.rsplit(".", 1)[-1] for name in linear} - {"lm_head"})


def _tied(model: PreTrainedModel) -> str | None:
    """The name of the embedding where it is the output layer too."""
    output = model.get_output_embeddings()
    weight = None if output is None else output.weight
    return next((name for name, p in model.named_parameters() if p is weight and "lm_head" not in name), None)


def _untied(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """The model with an output layer of its own: vLLM 0.32 on a CPU keeps a packed copy of a tied one, which a reload
    leaves as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    state = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    head = {"lm_head.weight": model.get_output_embeddings().weight.detach().cpu().clone()}
    write_tensors(state | head, folder / "model.safetensors", {"format": "pt"})
    return str(folder.resolve())


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise PacelineError(f"engine.api_key_env: the environment variable {variable} is not set: put the key there")
    return key
