"""Sampling noise as a pure function: no generator, no state, the same on every device and in every batch."""

import torch
from torch import Tensor

from paceline.model.torch_bits import mix, shift_right


def uniform(keys: Tensor, indices: Tensor) -> Tensor:
    """A float64 in [0, 1) for each (key, token index)."""
    bits = mix(keys ^ mix(indices))
    return shift_right(bits, 11).to(torch.float64) * 2.0**-53
