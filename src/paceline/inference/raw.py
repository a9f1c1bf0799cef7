"""A safetensors file that lies in memory as a row of bytes, for torch."""

import json

import torch
from torch import Tensor

from paceline.inference.base import RequestError

KINDS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Types by the names a safetensors file has for them."""


def tensors_in(row: Tensor) -> dict[str, Tensor]:
    """The tensors of a safetensors file that lies in memory as a row of bytes: views of it, nothing is copied."""
    try:
        start = 8 + int.from_bytes(bytes(row[:8].tolist()), "little")
        header = json.loads(bytes(row[8:start].numpy()))
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                low, high = entry["data_offsets"]
                raw = row[start + low : start + high]
                kind = KINDS[entry["dtype"]]
                raw = raw if raw.data_ptr() % kind.itemsize == 0 else raw.clone()  # numbers begin at their own width
                found[name] = raw.view(kind).view(entry["shape"])
        return found
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise RequestError(f"these {len(row)} bytes are no safetensors file: {error}") from error
