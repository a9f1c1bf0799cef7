"""Converts mlx arrays: from other libraries, to bits and bytes, and from one thread to another."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from paceline.weights.update import INTEGERS


def save(arrays: Mapping[str, mx.array], metadata: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    mx.save_safetensors(buffer, dict(arrays), metadata)
    return buffer.getvalue()


def save_file(arrays: Mapping[str, mx.array], file: Path, metadata: dict[str, str] | None = None) -> None:
    with Path(file).open("wb") as opened:  # Python's own, which says what the system refused
        mx.save_safetensors(opened, dict(arrays), metadata)


def load(data: bytes) -> dict[str, mx.array]:
    return _read(io.BytesIO(data))


def load_file(file: Path) -> dict[str, mx.array]:
    with Path(file).open("rb") as opened:
        return _read(opened)


def _read(opened: io.BufferedIOBase) -> dict[str, mx.array]:
    try:
        arrays = mx.load(opened, format="safetensors")
        assert isinstance(arrays, dict)
        mx.eval(arrays)
    except RuntimeError as error:  # as the package says it of a file that is none, or half of one
        raise SafetensorError(str(error)) from error
    return arrays


def bits_of(array: mx.array) -> NDArray:
    """Its elements in a row as integers of the same width. Memory is unified: the host looks at it where it lies."""
    return np.asarray(array.reshape(-1).view(getattr(mx, INTEGERS[array.itemsize])))


def as_array(tensor: Any) -> mx.array:
    """The same numbers in mlx, whichever library they come from. Those of mlx itself are handed through: they never
    change."""
    if isinstance(tensor, mx.array):
        return tensor
    if not hasattr(tensor, "detach"):
        return mx.array(tensor)
    tensor = tensor.detach().cpu().contiguous()
    if str(tensor.dtype) == "torch.bfloat16":  # which numpy does not have
        import torch

        return mx.array(tensor.view(torch.int16).numpy()).view(mx.bfloat16)
    return mx.array(tensor.numpy())


def evaluate(arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Computed, so that another thread may use them: what is still to be computed belongs to the thread that asked."""
    mx.eval(*arrays.values())
    return dict(arrays)
