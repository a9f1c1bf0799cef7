"""Maps LoRA tensor names of any library to one form, and checks that an adapter fits the model."""

import math
import re
from collections.abc import Mapping

from paceline.errors import PacelineError
from paceline.weights.update import Array

_PREFIX = re.compile(r"^(?:_orig_mod\.|base_model\.model\.)+")
_EXPECTED = "names end in `lora_A.weight` or `lora_B.weight`"
LORA = re.compile(r"^(?P<module>.+)\.lora_(?P<half>[AB])(?:\.[^.]+)?\.weight$")


class AdapterError(PacelineError):
    """An adapter that does not fit the model or its slots; nothing was changed."""


def canonical_name(name: str) -> str:
    """One name for a LoRA tensor, whichever library wrote it.

    >>> canonical_name("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    name = _PREFIX.sub("", name)
    found = LORA.match(name)
    return f"{found['module']}.lora_{found['half']}.weight" if found else name


def check_scale(scale: float) -> None:
    """Refuse what no adapter can be multiplied by."""
    if not math.isfinite(scale) or scale == 0:
        raise AdapterError(f"the adapter's scale is {scale}: it must be a finite number other than 0")


def pair_halves(
    tensors: Mapping[str, Array], layers: Mapping[str, tuple[int, int]], rank: int
) -> dict[str, tuple[Array, Array]]:
    """An adapter's A and B by layer, or an error that says what is wrong with them. `layers` are those that can be
    adapted, with the widths of their input and output; `rank` is the highest their slots hold."""
    halves: dict[str, dict[str, Array]] = {}
    for given, tensor in tensors.items():
        found = LORA.match(canonical_name(given))
        if found is None:
            raise AdapterError(f"adapter tensor `{given}` is no LoRA matrix of a linear layer: {_EXPECTED}")
        name, half = found["module"], found["half"]
        if name not in layers:
            raise AdapterError(f"adapter tensor `{given}`: the model has no adapted layer `{name}`")
        if half in halves.setdefault(name, {}):
            raise AdapterError(f"adapter tensor `{given}` is there twice under different spellings")
        halves[name][half] = tensor
    if not halves:
        raise AdapterError("the adapter holds no tensors")
    return {name: _pair(name, both, layers[name], rank) for name, both in halves.items()}


def _pair(name: str, halves: Mapping[str, Array], widths: tuple[int, int], most: int) -> tuple[Array, Array]:
    for half, other in ("AB", "BA"):
        if half not in halves:
            raise AdapterError(f"adapter layer `{name}` has lora_{other} but no lora_{half}")
    a, b = halves["A"], halves["B"]
    inputs, outputs = widths
    rank = a.shape[0] if a.ndim == 2 else 0
    if not rank or a.shape != (rank, inputs) or b.shape != (outputs, rank):
        raise AdapterError(
            f"adapter layer `{name}`: lora_A is {list(a.shape)} and lora_B {list(b.shape)}, but the model needs "
            f"[rank, {inputs}] and [{outputs}, rank]"
        )
    if rank > most:
        raise AdapterError(f"adapter layer `{name}` has rank {rank}, but the slots hold rank {most} at most")
    if not all("float" in str(half.dtype) for half in (a, b)):
        raise AdapterError(f"adapter layer `{name}` is {a.dtype} and {b.dtype}; only floating point is supported")
    return a, b
