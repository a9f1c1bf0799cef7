"""The bits of torch tensors, and the scramble of `bits.py` on them."""

import torch
from torch import Tensor

WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their width in bytes."""


def bits_of(tensor: Tensor) -> Tensor:
    """Its elements in a row as integers of the same width: a view where the tensor is contiguous."""
    return tensor.detach().contiguous().view(-1).view(WIDTHS[tensor.element_size()])


def mix(x: Tensor) -> Tensor:
    """A bijective scramble of int64: the finaliser of splitmix64."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, which torch shifts arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
