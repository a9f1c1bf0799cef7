"""Exports the trained policy as a Hugging Face folder that anything can load."""

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.model.dtypes import dtype_name, export_dtype
from paceline.model.manifest import write_manifest


def export(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    state: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    *,
    written: torch.dtype | None = None,
    adapter: bool = True,
) -> None:
    """Weights, config and tokenizer. Adapters are merged into the weights and also saved beside them in peft's form.

    Of a sharded model the whole tensors must be given, with the type they are in. Weights are `written` in the type of
    the checkpoint the model was loaded from unless another is given, so that an export is as large as its source."""
    folder.mkdir(parents=True, exist_ok=True)
    adapted = hasattr(model, "peft_config")
    state = model.state_dict() if state is None else state
    state = merged_state(model, state) if adapted else state
    # Saving reads the module's config, which names Paceline's attention and the adapters: a copy forgets both.
    shell = copy.copy(model)
    shell.config = copy.deepcopy(model.config)
    shell._hf_peft_config_loaded = False
    written = written or getattr(torch, export_dtype(model.name_or_path, dtype_name(dtype or model.dtype)))
    shell.save_pretrained(folder, state_dict=_plain(state, written))
    if written != model.dtype:  # which saving takes from the module
        shell.config.dtype = written
        shell.config.save_pretrained(folder)
    if adapted and adapter:
        save_adapter(model, folder / "adapter")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_manifest(folder)


def _plain(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors to write. What two names share stays shared, so that saving leaves the second one out."""
    out: dict[str, Tensor] = {}
    seen: dict[tuple, Tensor] = {}
    for name, tensor in state.items():
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if key not in seen:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            seen[key] = tensor.detach().to("cpu", kind).contiguous()
        out[name] = seen[key]
    return out


def merged_state(model: PreTrainedModel, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A whole state dict with base + scale * B A computed in float32 and rounded once."""
    from peft.tuners.lora.layer import LoraLayer

    state = {name.replace(".base_layer.", "."): t for name, t in whole.items() if "lora_" not in name}
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            base = state[f"{path}.weight"]
            total = base.float()
            for adapter in module.active_adapters:
                a, b = (whole[f"{path}.lora_{half}.{adapter}.weight"].float() for half in "AB")
                total = total + (b @ a) * module.scaling[adapter]
            state[f"{path}.weight"] = total.to(base.dtype)
    return state


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """The adapter alone, in peft's form."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for name, adapter in model.peft_config.items():
        state = get_peft_model_state_dict(model, adapter_name=name)
        save_file(
            {f"base_model.model.{key}": t.detach().cpu().contiguous() for key, t in state.items()},
            folder / "adapter_model.safetensors",
        )
        adapter.save_pretrained(folder)
