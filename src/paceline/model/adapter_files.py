"""Reads a LoRA adapter from a folder in peft's form: `adapter_config.json` and `adapter_model.safetensors`."""

import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.model.adapters import AdapterError
from paceline.model.manifest import problems, several

# What would change the numbers and has no place in a slot, with the value that means "not used".
_UNUSED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
}


def read_adapter(folder: Path) -> tuple[dict[str, Tensor], float]:
    """The adapter's tensors under the names of the file, and its scale: what `Adapters.load` takes."""
    if found := problems(folder):
        raise AdapterError(f"adapter folder `{folder}` is damaged: {several(found)}; export it again")
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise AdapterError(f"adapter folder `{folder}` cannot be read: {error}") from error
    return tensors, adapter_scale(config)


def adapter_scale(config: dict[str, Any]) -> float:
    """alpha / rank of a peft config; refuses what is more than plain LoRA."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterError("adapter_config.json: only adapters of peft_type LORA are supported")
    for name, unused in _UNUSED.items():
        if config.get(name) not in unused:
            raise AdapterError(f"adapter_config.json: `{name}` is set, which adapter slots do not support")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise AdapterError(f"adapter_config.json: r = {rank} and lora_alpha = {alpha} give no scale")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
