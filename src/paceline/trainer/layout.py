"""How a model's weights lie on the ranks, and what follows for everything that touches them."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.model.bits import MASK
from paceline.model.weights import fingerprint
from paceline.trainer.world import World

T = TypeVar("T")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory; all of it where it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


class Layout:
    """Every rank, or the only one, holds all weights. Ranks need not keep step with each other."""

    lockstep = False
    """Each forward and backward pass is a meeting of all ranks: all must run equally many."""
    shards: World | None = None
    """The ranks that share one model between them, where one is shared."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        """What the model computes in and publishes."""

    def run(self, work: Callable[[], T]) -> T:
        """Do work that needs the model's own weights: a forward pass and the head after it."""
        return work()

    def summed(self, name: str) -> bool:
        """Whether a parameter's gradient comes as the sum over all ranks."""
        return False

    def copies(self, name: str) -> int:
        """How many of `shards` hold the same part of a parameter."""
        return 1

    def settle(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Make gradients one where ranks have the same parameter and saw parts of a token. Every rank must ask, once
        for all micro-batches of a step."""

    def narrow(self, parameter: Tensor) -> torch.dtype:
        """The type a parameter is computed with, which it may be kept wider than."""
        return parameter.dtype

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of something shaped like a parameter, as a tensor that knows where it belongs."""
        return tensor

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """All ranks' parts of something shaped like a parameter; every rank must ask."""
        return tensor

    def room(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for this rank's part of a tensor that a checkpoint holds under a parameter's name."""
        return torch.empty(shape, dtype=dtype)

    def fingerprint(self, tensors: Mapping[str, Tensor]) -> str:
        """Of the whole tensors, one at a time: fingerprints add up."""
        parts = (fingerprint([(name, self.whole(name, tensor))]) for name, tensor in tensors.items())
        return f"{sum(int(part, 16) for part in parts) & MASK:016x}"

    def state(self, model: nn.Module, keep: bool) -> dict[str, Tensor]:
        """The model's state dict with whole tensors in the type it computes in, for a rank that keeps it. Every rank
        must ask. One tensor at a time: all at once would not fit beside the model."""
        return dict(model.state_dict()) if keep else {}
