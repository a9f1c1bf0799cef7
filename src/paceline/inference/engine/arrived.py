"""Weights brought to where an engine can copy them from, before decoding has to pause for it."""

from collections.abc import Mapping

import torch
from torch import Tensor

PINNED_BYTES = 16 << 30
"""Of one update that lies in the host's memory and goes to a GPU: what is copied to where the GPU fetches it at full
speed. What is beyond waits where it is, and lengthens the pause."""


def at_hand(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The same tensors, nothing of them to be read from a file any more. A second copy of the weights is never made on
    the device; on the host it is, and only for a GPU."""
    ready: dict[str, Tensor] = {}
    left = PINNED_BYTES
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        slow = device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned()
        if slow and tensor.nbytes <= left:
            tensor = tensor.pin_memory(device)
            left -= tensor.nbytes
        ready[name] = tensor
    return ready
