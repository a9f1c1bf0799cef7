"""A decode step's attention over slots by our own kernel."""

import torch
from torch import Tensor

from paceline.model.native import kernels

MOST_HEADS = 256
"""What the kernel has room for."""


def serves(keys: Tensor, heads: int) -> bool:
    """Whether there is a kernel for a cache like this, [slots, length, kv heads, dim], under so many query heads."""
    if kernels() is None or not keys.is_cpu or keys.dtype != torch.float32:
        return False
    return heads <= MOST_HEADS and keys.shape[3] % 16 == 0


def attend(
    keys: Tensor, values: Tensor, q: Tensor, slots: Tensor, positions: Tensor, scale: float, window: int | None
) -> Tensor:
    """The query of row r, [heads, dim], stands at `positions[r]` of slot `slots[r]` and sees itself and all before."""
    library = kernels()
    assert library is not None
    q = q.contiguous()
    out = torch.empty_like(q)
    rows, heads, dim = q.shape
    pointers = (t.data_ptr() for t in (q, keys, values, out, slots, positions))
    library.paceline_attend(*pointers, rows, heads, keys.shape[2], dim, keys.shape[1], window or 0, scale)
    return out


def keep(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Put new keys and values, [rows, kv heads, dim], into their places."""
    library = kernels()
    assert library is not None
    k, v = k.contiguous(), v.contiguous()
    pointers = (t.data_ptr() for t in (k, v, keys, values, slots, positions))
    library.paceline_keep(*pointers, len(k), keys.shape[1], keys.shape[2] * keys.shape[3])
