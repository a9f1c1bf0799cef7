"""An update that was read and looked at before decoding has to pause for it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.model import WeightUpdate

PINNED_BYTES = 16 << 30
"""Of one update that lies in the host's memory and goes to a GPU: what is copied to where the GPU fetches it at full
speed. What is beyond waits where it is, and lengthens the pause."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """What is left to do is to copy it."""

    update: WeightUpdate
    tensors: Mapping[str, Tensor]
    """As they will be copied; none where a delta stands for them."""
    sent: str | None = None
    """Their fingerprint, unless nobody is to check it or a delta will lead to it."""
    check: bool = True


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
