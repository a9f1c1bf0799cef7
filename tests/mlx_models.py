"""The tests' models in MLX: as they are, or quantised."""

import copy
import functools
import json
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx.utils import tree_flatten
from transformers import PreTrainedModel

from paceline.config.model import ModelConfig
from paceline.model.mlx.loading import MlxModel, clone_model, load_model
from paceline.model.mlx.lora import replace_layer
from paceline.weights.mlx_arrays import as_array

QUANTISED = {"group_size": 32, "bits": 4}


def as_mlx(model: PreTrainedModel) -> MlxModel:
    """The same weights in MLX, whatever they are: not even NaN is refused."""
    made = clone_model(_loaded(model.config.to_json_string(use_diff=False), type(model)))
    for name, parameter in model.named_parameters():
        replace_layer(made.net, name, as_array(parameter))
    return made


@functools.cache
def _loaded(config: str, kind: type[PreTrainedModel]) -> MlxModel:
    """A model of this config, with whatever weights."""
    described = kind.config_class.from_dict(json.loads(config))
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        kind._from_config(described).save_pretrained(folder)
        return load_model(ModelConfig(name=folder, dtype=str(described.dtype or torch.float32).removeprefix("torch.")))


def quantised(model: PreTrainedModel, folder: Path) -> tuple[MlxModel, PreTrainedModel]:
    """The model with 4-bit weights, from a folder as mlx-lm writes it; and one in torch with what these stand for."""
    model.save_pretrained(folder)
    net = as_mlx(model).net
    nn.quantize(net, **QUANTISED)
    (folder / "model.safetensors").unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(net.parameters())), {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": QUANTISED}))
    dense = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in net.named_modules():
            if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
                whole = mx.dequantize(module.weight, module.scales, module.biases, **QUANTISED)
                dense.get_parameter(f"{name}.weight").copy_(torch.from_numpy(np.array(whole)))
    return load_model(ModelConfig(name=str(folder), dtype="float32")), dense
