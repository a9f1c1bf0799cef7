"""Loads Hugging Face models for torch from a folder, a hub name, or the package itself.

Weights that a model does not have, lacks, or cannot compute with are refused by the names of the tensors: transformers
fills a missing tensor with random numbers, leaves a surplus one out and says either in a log line only.
"""

import copy
import logging
import math
import re
from collections.abc import Callable, Generator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from paceline.config.model import ModelConfig
from paceline.model.adapters import target_layers, unadaptable_layers
from paceline.model.attention import ATTENTION
from paceline.model.cpu import warn_of_slow
from paceline.model.dtypes import resolve_dtype
from paceline.model.hub import fetch
from paceline.model.source import ModelError, base_name, check_source, resolve, unloadable_message
from paceline.model.states import mix_by_plan
from paceline.model.support import build, check_supported, refusals_name, without_dropout
from paceline.weights.manifest import join_first

# Its bars for loading and saving would tear the live screen; phases are shown there instead.
transformers_logging.disable_progress_bar()

HARMLESS = re.compile(r"(rotary_emb\.inv_freq|rotary_pos_emb\.inv_freq|\.attn\.bias|attention\.bias|\.masked_bias)$")
"""Tables of older checkpoints that a model computes by itself: rotary frequencies and causal masks. A model that has a
parameter of such a name expects it, so that it is not among the surplus ones."""
REPORTER = logging.getLogger("transformers")


def load_model(config: ModelConfig, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The causal LM with Paceline's attention, ready for `attach_lora` or full fine-tuning."""
    source = resolve(config.name)
    if Path(source).is_dir():
        check_source(Path(source), config.trust_remote_code)
    with refusals_name(config.name):
        model = _read(config, source, str(device)).to(device).eval()
        check_finite(model, config.name)
        if model.device.type == "cpu" and model.dtype != torch.float32:
            warn_of_slow(model.dtype)
        without_dropout(model)
        check_supported(model)
    model.generation_config = copy.deepcopy(model.generation_config)
    return model


def _read(config: ModelConfig, source: str, device: str) -> PreTrainedModel:
    fetch(source)
    try:
        load = partial(
            AutoModelForCausalLM.from_pretrained,
            source,
            dtype=getattr(torch, resolve_dtype(config, device)),
            attn_implementation=ATTENTION,
            trust_remote_code=config.trust_remote_code,
            local_files_only=not config.trust_remote_code,
            use_safetensors=True,
        )
        model, info = build(lambda: _loading_info(load))
        mix_by_plan(model)
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(unloadable_message("model", config.name, error)) from error
    for problem in tensor_problems(info, config.name):
        raise ModelError(problem)
    return model


def attach_lora(model: PreTrainedModel, config: ModelConfig, seed: int) -> PreTrainedModel:
    """Freeze the base and inject adapters in place; a no-op without a `lora` section."""
    if config.lora is None:
        return model
    from peft import LoraConfig, inject_adapter_in_model

    model.requires_grad_(False)
    targets, left_out = config.lora.targets, unadaptable_layers(model)
    if left_out:  # refuses what is named and cannot be adapted
        chosen = list(target_layers(model, targets))
        targets = chosen if targets == "all-linear" else targets
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapters = LoraConfig(
            r=config.lora.rank,
            lora_alpha=config.lora.alpha,  # ty: ignore[invalid-argument-type] - peft takes any number
            lora_dropout=config.lora.dropout,
            target_modules=targets,
            exclude_modules=list(left_out) or None,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base_name(model.name_or_path) if model.name_or_path else None,
        )
        inject_adapter_in_model(adapters, model)
    return model


def clone_model(model: PreTrainedModel) -> PreTrainedModel:
    """A second module tree for the engine: own config, own trainable tensors, the frozen ones shared."""
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    clone = copy.deepcopy(model, shared)
    for parameter in clone.parameters():
        parameter.requires_grad_(False)
    return clone.eval()


def clone_for_engine(model: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    """The engine's model, made before `attach_lora`: plain, without peft.

    Under LoRA the whole base is frozen and so shared with the trainer; the adapters reach the engine in its slots.
    """
    if config.lora is not None:
        model.requires_grad_(False)
    return clone_model(model)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name: what a weight update carries."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def trained_adapter(model: nn.Module) -> tuple[dict[str, Tensor], float] | None:
    """The adapter peft has put into a model: its tensors by canonical name and its scale; None without one."""
    if not hasattr(model, "peft_config"):
        return None
    from peft.tuners.lora.layer import LoraLayer

    tensors: dict[str, Tensor] = {}
    scales = set()
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            (adapter,) = module.active_adapters
            scales.add(float(module.scaling[adapter]))
            tensors[f"{name}.lora_A.weight"] = module.lora_A[adapter].weight.detach()
            tensors[f"{name}.lora_B.weight"] = module.lora_B[adapter].weight.detach()
    (scale,) = scales
    return tensors, scale


def tensor_problems(info: dict[str, Any], name: str) -> Generator[str]:
    """Sentences for what `output_loading_info` says."""
    if shapes := sorted(info["mismatched_keys"]):
        told = [
            f"{key} is {_shape(there)} in the files and {_shape(asked)} by config.json" for key, there, asked in shapes
        ]
        yield f"model `{name}`: {join_first(told)}: one of the two belongs to another model: download both again"
    if missing := sorted(info["missing_keys"]):
        yield f"model `{name}`: its weight files lack {join_first(missing)}: download the model again"
    if surplus := sorted(key for key in info["unexpected_keys"] if not HARMLESS.search(key)):
        yield (
            f"model `{name}`: its weight files hold {join_first(surplus)}, which its config.json gives no place: "
            "use the config.json that belongs to the weights, or write a folder without them: "
            f"AutoModelForCausalLM.from_pretrained('{name}').save_pretrained(FOLDER)"
        )


def header_problems(folder: Path, name: str) -> list[str]:
    """The same from the files' headers: the model is laid out without memory, and no weights are read."""
    load = partial(AutoModelForCausalLM.from_pretrained, folder, device_map="meta", local_files_only=True)
    try:
        info = _loading_info(partial(load, use_safetensors=True))[1]
    except (OSError, SafetensorError) as error:
        return [unloadable_message("model", name, error)]
    except (ValueError, ImportError, RuntimeError, KeyError):  # not without memory: `train` checks it then
        return []
    return list(tensor_problems(info, name))


def check_finite(model: nn.Module, name: str) -> None:
    """Refuse weights with NaN or infinity. One sum for each tensor tells whether there may be any."""
    named = {key: p.detach() for key, p in model.named_parameters() if p.is_floating_point() and p.element_size() > 1}
    sums: list[float] = []
    for device in dict.fromkeys(tensor.device for tensor in named.values()):
        here = [tensor for tensor in named.values() if tensor.device == device]
        sums += torch.stack([tensor.sum(dtype=torch.float32) for tensor in here]).tolist()
    if all(map(math.isfinite, sums)):
        return
    if bad := [key for key, tensor in named.items() if not bool(torch.isfinite(tensor).all())]:
        verb = "holds" if len(bad) == 1 else "hold"
        raise ModelError(f"model `{name}`: {join_first(bad)} {verb} NaN or infinity: download the model again")


def _loading_info(load: Callable[..., Any]) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model and what did not fit, without the table that transformers logs of it."""
    level = REPORTER.level
    REPORTER.setLevel(logging.ERROR)
    try:
        return load(output_loading_info=True, ignore_mismatched_sizes=True)
    finally:
        REPORTER.setLevel(level)


def _shape(size: Iterable[int]) -> str:
    return "x".join(map(str, size)) or "a number"
