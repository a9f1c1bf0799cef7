"""LoRA for training: adapters beside the layers of a frozen base, which may be quantised."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from paceline.config.model import LoRAConfig
from paceline.model.adapter_names import AdapterError
from paceline.model.mlx.loading import MlxModel
from paceline.weights.update import salt


class LoraLinear(nn.Module):
    """base(x) + scale * B A x, with A [rank, in] and B [out, rank], as peft lays them."""

    def __init__(self, base: Any, a: mx.array, scale: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = base
        self.lora_A = a
        self.lora_B = mx.zeros((widths(base)[1], a.shape[0]), a.dtype)
        self.scale = scale
        self.dropout = nn.Dropout(dropout)

    def __call__(self, x: mx.array) -> mx.array:
        low = self.dropout(x) @ self.lora_A.T
        return self.base(x) + (self.scale * (low @ self.lora_B.T)).astype(x.dtype)


def widths(linear: Any) -> tuple[int, int]:
    """Inputs and outputs of a layer; packed weights hold several in one number."""
    outputs, inputs = linear.weight.shape
    return (inputs * 32 // linear.bits if isinstance(linear, nn.QuantizedLinear) else inputs), outputs


def target_layers(model: MlxModel, targets: Sequence[str] | str) -> dict[str, Any]:
    """The layers peft would adapt for the same targets, by name."""
    linear = {
        name: m
        for name, m in model.net.named_modules()
        if isinstance(m, nn.Linear | nn.QuantizedLinear) and name != "lm_head"
    }
    if targets == "all-linear":
        return dict(sorted(linear.items()))
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if "lm_head" in wanted or "embed_tokens" in wanted:
        raise AdapterError(
            "adapter targets `lm_head` and `embed_tokens` are the output layer and the embedding, which the engine "
            'cannot adapt: leave them out, or write targets = "all-linear"'
        )
    found = {n: m for n, m in sorted(linear.items()) if any(n == t or n.endswith(f".{t}") for t in wanted)}
    if not found:
        raise AdapterError(f"no linear layer of this model is called {' or '.join(f'`{t}`' for t in wanted)}")
    return found


def attach_lora(model: MlxModel, config: LoRAConfig | None, seed: int) -> MlxModel:
    """Freeze the base and put adapters beside it, in place; a no-op without settings. A starts as peft's does, uniform
    in +-1/sqrt(in), B at zero."""
    if config is None:
        return model
    model.net.freeze()
    for name, layer in target_layers(model, config.targets).items():
        inputs, _ = widths(layer)
        noise = np.random.default_rng((seed, salt(name))).uniform(-1, 1, (config.rank, inputs)) / math.sqrt(inputs)
        adapted = LoraLinear(layer, mx.array(noise.astype(np.float32)), config.alpha / config.rank, config.dropout)
        adapted.base.freeze()
        replace_layer(model.net, name, adapted)
    mx.eval(model.net.parameters())
    return model


def replace_layer(net: Any, name: str, layer: Any) -> None:
    """Replace one layer or parameter of a module tree: from the next pass on the model computes with it."""
    *parents, child = name.split(".")
    for part in parents:
        net = net[int(part)] if isinstance(net, list) else getattr(net, part)
    setattr(net, child, layer)


def adapted_layers(net: Any) -> dict[str, LoraLinear]:
    """By the name of the layer they adapt."""
    return {name: m for name, m in sorted(net.named_modules()) if isinstance(m, LoraLinear)}


def adapter_tensors(net: Any) -> tuple[dict[str, mx.array], float] | None:
    """The adapter by canonical names, and its scale; None without one."""
    layers = adapted_layers(net)
    if not layers:
        return None
    tensors = {f"{name}.lora_A.weight": layer.lora_A for name, layer in layers.items()}
    tensors |= {f"{name}.lora_B.weight": layer.lora_B for name, layer in layers.items()}
    return tensors, next(iter(layers.values())).scale


def load_adapter(net: Any, tensors: Mapping[str, mx.array]) -> None:
    for name, layer in adapted_layers(net).items():
        layer.lora_A = tensors[f"{name}.lora_A.weight"]
        layer.lora_B = tensors[f"{name}.lora_B.weight"]
