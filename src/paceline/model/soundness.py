"""Refuses weights that a model does not have, lacks, or cannot compute with, by the names of the tensors.

transformers fills a missing tensor with random numbers, leaves a surplus one out and says either in a log line only.
"""

import logging
import math
import re
from collections.abc import Callable, Generator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from paceline.model.source import ModelError, unloadable
from paceline.weights.manifest import several

# Its bars for loading and saving would tear the live screen; phases are shown there instead.
transformers_logging.disable_progress_bar()

HARMLESS = re.compile(r"(rotary_emb\.inv_freq|rotary_pos_emb\.inv_freq|\.attn\.bias|attention\.bias|\.masked_bias)$")
"""Tables of older checkpoints that a model computes by itself: rotary frequencies and causal masks. A model that has a
parameter of such a name expects it, so that it is not among the surplus ones."""
REPORTER = logging.getLogger("transformers")


def load_checked(load: Callable[..., Any], name: str) -> PreTrainedModel:
    """Call `from_pretrained` and raise a sentence where the tensors in the files are not the model's."""
    model, info = _loading_info(load)
    for problem in tensor_problems(info, name):
        raise ModelError(problem)
    return model


def tensor_problems(info: dict[str, Any], name: str) -> Generator[str]:
    """Sentences for what `output_loading_info` says."""
    if shapes := sorted(info["mismatched_keys"]):
        told = [
            f"{key} is {_shape(there)} in the files and {_shape(asked)} by config.json" for key, there, asked in shapes
        ]
        yield f"model `{name}`: {several(told)}: one of the two belongs to another model: download both again"
    if missing := sorted(info["missing_keys"]):
        yield f"model `{name}`: its weight files lack {several(missing)}: download the model again"
    if surplus := sorted(key for key in info["unexpected_keys"] if not HARMLESS.search(key)):
        yield (
            f"model `{name}`: its weight files hold {several(surplus)}, which its config.json gives no place: "
            "use the config.json that belongs to the weights, or write a folder without them: "
            f"AutoModelForCausalLM.from_pretrained('{name}').save_pretrained(FOLDER)"
        )


def header_problems(folder: Path, name: str) -> list[str]:
    """The same from the files' headers: the model is laid out without memory, and no weights are read."""
    load = partial(AutoModelForCausalLM.from_pretrained, folder, device_map="meta", local_files_only=True)
    try:
        info = _loading_info(partial(load, use_safetensors=True))[1]
    except (OSError, SafetensorError) as error:
        return [unloadable("model", name, error)]
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
        raise ModelError(f"model `{name}`: {several(bad)} {verb} NaN or infinity: download the model again")


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
