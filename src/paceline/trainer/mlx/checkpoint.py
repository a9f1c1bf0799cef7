"""Writes and reads an mlx trainer's checkpoint, and exports the policy as a Hugging Face folder."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from transformers import PreTrainedTokenizerBase

from paceline.errors import TrainerError
from paceline.model.dtypes import dtype_name, export_dtype
from paceline.model.mlx.loading import MlxModel
from paceline.model.mlx.lora import LoraLinear, adapted_layers
from paceline.trainer.checkpoint import (
    FILE,
    FOLDER,
    check_files,
    read_state,
    strip_prefix,
    wrap_checkpoint_errors,
    write_state,
)
from paceline.weights.manifest import write_manifest
from paceline.weights.mlx_arrays import load_file
from paceline.weights.tensors import write_tensors


def write(folder: Path, tensors: Mapping[str, mx.array], state: Mapping) -> None:
    write_tensors(tensors, folder / FILE)
    write_state(folder, state)


def read(folder: Path) -> tuple[dict[str, mx.array], dict]:
    """All tensors, in memory, and the state."""
    with wrap_checkpoint_errors(folder):
        state = read_state(folder)
        return _tensors(folder), state


def masters(folder: Path) -> dict[str, mx.array]:
    """The float32 weights of a checkpoint by parameter name."""
    check_files(folder)
    with wrap_checkpoint_errors(folder):
        tensors = _tensors(folder)
    return strip_prefix("master/", tensors)


def _tensors(folder: Path) -> dict[str, mx.array]:
    if (folder / FOLDER).is_dir():
        raise TrainerError(f"checkpoint {folder} was written by several ranks, which only torch can put together")
    return load_file(folder / FILE)


QUANTISED = ("quantization", "quantization_config")
"""Config keys about packed weights; those written here are plain."""


def export(model: MlxModel, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Weights with adapters merged, config and tokenizer; the adapters also apart, in peft's and mlx-lm's form."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = export_dtype(model.base, dtype_name(model.dtype))
    weights = {name: array.astype(getattr(mx, dtype)) for name, array in merged_weights(model).items()}
    write_tensors(weights, folder / "model.safetensors", {"format": "pt"})
    config = copy.deepcopy(model.config)
    for name in QUANTISED:
        if hasattr(config, name):
            delattr(config, name)
    config.dtype = dtype
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    if layers := adapted_layers(model.net):
        _save_for_peft(layers, model, folder / "adapter")
        _save_for_mlx_lm(layers, model, folder / "adapter-mlx")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_manifest(folder)


def merged_weights(model: MlxModel) -> dict[str, mx.array]:
    """All weights by Hugging Face's names, dequantised; base + scale * B A is computed in float32 and rounded once."""
    state = dict(tree_flatten(model.net.parameters()))
    for path, module in model.net.named_modules():
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            packed, kind = (module.weight, module.scales, module.get("biases")), ("group_size", "bits", "mode")
            unpacked = mx.dequantize(*packed, **{name: getattr(module, name) for name in kind})
            state[f"{path}.weight"] = unpacked.astype(model.dtype)
            state.pop(f"{path}.scales")
            state.pop(f"{path}.biases", None)
    for path, layer in adapted_layers(model.net).items():
        base = state.pop(f"{path}.base.weight")
        a, b = (state.pop(f"{path}.lora_{half}").astype(mx.float32) for half in "AB")
        state[f"{path}.weight"] = (base.astype(mx.float32) + layer.scale * (b @ a)).astype(base.dtype)
    return {name.replace(".base.", "."): array for name, array in state.items()}


def _save_for_peft(layers: Mapping[str, LoraLinear], model: MlxModel, folder: Path) -> None:
    tensors = {f"base_model.model.{name}.lora_A.weight": layer.lora_A for name, layer in layers.items()}
    tensors |= {f"base_model.model.{name}.lora_B.weight": layer.lora_B for name, layer in layers.items()}
    rank, scale, dropout = _settings(layers)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.base,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": dropout,
        "target_modules": _targets(layers, model),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    _write(folder, tensors, "adapter_model.safetensors", config)


def _save_for_mlx_lm(layers: Mapping[str, LoraLinear], model: MlxModel, folder: Path) -> None:
    """Its matrices are the transposes, and its scale stands by itself."""
    tensors = {f"{name}.lora_a": layer.lora_A.T for name, layer in layers.items()}
    tensors |= {f"{name}.lora_b": layer.lora_B.T for name, layer in layers.items()}
    rank, scale, dropout = _settings(layers)
    parameters = {"rank": rank, "scale": scale, "dropout": dropout, "keys": list(layers)}
    config = {"fine_tune_type": "lora", "num_layers": len(model.layers), "lora_parameters": parameters}
    _write(folder, tensors, "adapters.safetensors", config)


def _settings(layers: Mapping[str, LoraLinear]) -> tuple[int, float, float]:
    layer = next(iter(layers.values()))
    return layer.lora_A.shape[0], layer.scale, 1 - layer.dropout._p_1


def _targets(layers: Mapping[str, LoraLinear], model: MlxModel) -> list[str]:
    """The last part of each name, as run files say it, if that chooses the same layers; else whole names."""
    ends = {name.rpartition(".")[2] for name in layers}
    chosen = {name for name, _ in model.net.named_modules() if name.rpartition(".")[2] in ends}
    return sorted(ends if chosen == layers.keys() else layers)


def _write(folder: Path, tensors: Mapping[str, mx.array], file: str, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, folder / file, {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
