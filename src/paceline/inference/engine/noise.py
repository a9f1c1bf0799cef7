"""Sampling noise as a pure function: no generator, no state, the same on every device and in every batch."""

import torch
from torch import Tensor

from paceline.model.bits import mix, mix_int, shift_right


def noise_key(*parts: int) -> int:
    """One 64-bit key from (run seed, ticket, member, turn, ...), as a signed integer that fits a tensor."""
    key = 0
    for part in parts:
        key = mix_int(key ^ mix_int(part & ((1 << 64) - 1)))
    return key - (1 << 64) if key >= 1 << 63 else key


def uniform(keys: Tensor, indices: Tensor) -> Tensor:
    """A float64 in [0, 1) for each (key, token index)."""
    bits = mix(keys ^ mix(indices))
    return shift_right(bits, 11).to(torch.float64) * 2.0**-53
