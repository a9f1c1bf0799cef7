"""Arrays of mlx on their way in and out: from other libraries, to bits, and from one thread to another."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

INTEGERS = {1: mx.uint8, 2: mx.int16, 4: mx.int32, 8: mx.int64}
"""By their width in bytes."""


def bits_of(array: mx.array) -> NDArray:
    """Its elements in a row as integers of the same width. Memory is unified: the host looks at it where it lies."""
    return np.asarray(array.reshape(-1).view(INTEGERS[array.itemsize]))


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


def settled(arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Computed, so that another thread may use them: what is still to be computed belongs to the thread that asked."""
    mx.eval(*arrays.values())
    return dict(arrays)
