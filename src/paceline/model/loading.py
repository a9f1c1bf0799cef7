"""Loads Hugging Face models for torch from a folder, a hub name, or the package itself."""

import copy
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.config.model import ModelConfig
from paceline.model.attention import ATTENTION
from paceline.model.cpu import warn_of_slow
from paceline.model.dtypes import compute_dtype
from paceline.model.soundness import check_finite, load_checked
from paceline.model.source import ModelError, base_name, export_problems, resolve, source_problems, unloadable
from paceline.model.support import build, check_supported, refusals_name, without_dropout


def load_model(config: ModelConfig, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The causal LM with Paceline's attention, ready for `attach_lora` or full fine-tuning."""
    source = resolve(config.name)
    if Path(source).is_dir():
        for problem in source_problems(Path(source), trust_remote_code=config.trust_remote_code):
            raise ModelError(problem)
        for problem in export_problems(Path(source)):
            raise ModelError(problem)
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
    try:
        load = partial(
            AutoModelForCausalLM.from_pretrained,
            source,
            dtype=getattr(torch, compute_dtype(config, device)),
            attn_implementation=ATTENTION,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
        )
        return build(lambda: load_checked(load, config.name))
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(unloadable("model", config.name, error)) from error


def attach_lora(model: PreTrainedModel, config: ModelConfig, seed: int) -> PreTrainedModel:
    """Freeze the base and inject adapters in place; a no-op without a `lora` section."""
    if config.lora is None:
        return model
    from peft import LoraConfig, inject_adapter_in_model

    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapters = LoraConfig(
            r=config.lora.rank,
            lora_alpha=config.lora.alpha,  # ty: ignore[invalid-argument-type] - peft takes any number
            lora_dropout=config.lora.dropout,
            target_modules=config.lora.targets,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base_name(model.name_or_path) if model.name_or_path else None,
        )
        inject_adapter_in_model(adapters, model)
    return model


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A second module tree for the engine: own config, own trainable tensors, the frozen ones shared."""
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    clone = copy.deepcopy(model, shared)
    for parameter in clone.parameters():
        parameter.requires_grad_(False)
    return clone.eval()


def engine_twin(model: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    """The engine's model, made before `attach_lora`: plain, without peft.

    Under LoRA the whole base is frozen and so shared with the trainer; the adapters reach the engine in its slots.
    """
    if config.lora is not None:
        model.requires_grad_(False)
    return twin(model)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name: what a weight update carries."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
