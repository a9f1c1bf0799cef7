"""What travels from trainer to engine, and how both prove that they hold the same bits."""

import functools
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.model.bits import MASK, mix

if TYPE_CHECKING:
    from paceline.model.delta import Delta

WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their width in bytes."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter an update carries instead of the model's own weights."""

    name: str
    """The model name requests choose it by; empty for the policy's own."""
    scale: float
    """alpha / rank: what the product of its two matrices is multiplied by."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A short token sequence and the log probabilities the trainer gives its tokens under the new weights."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One per token at temperature 1; 0.0 for the first."""
    tolerance: float
    """Largest mean absolute difference that still counts as the same weights."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The trainable tensors of one policy version, by parameter name.

    In one process the tensors are the trainer's own: whoever publishes must await the engine's copy before training on.
    """

    version: int
    tensors: Mapping[str, Tensor]
    adapter: Adapter | None = None
    """Set when the tensors are an adapter's: names end in `lora_A.weight` and `lora_B.weight`."""
    expected: str | None = None
    """The sender's fingerprint of these tensors; an engine that holds others refuses the update."""
    canary: Canary | None = None
    delta: "Delta | None" = None
    """The way here from an earlier version: an engine that holds that one may take it in place of the tensors, which
    are then empty or read only by those who need them."""

    @property
    def names(self) -> Collection[str]:
        """Of all tensors it stands for, also of those that a delta leaves as they are."""
        return self.tensors.keys() if self.delta is None else self.delta.entries.keys()

    def fingerprint(self) -> str:
        return fingerprint(self.tensors.items())


@dataclass(frozen=True, slots=True)
class Policy:
    """What an engine really serves."""

    version: int
    fingerprint: str


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> str:
    """A sum over tensors of sum(bits[i] * mix(i)) mod 2^64, as hex.

    Additive over elements with their global index, so shards combine by sum. The name's hash enters each tensor's sum,
    so two tensors cannot trade places unseen.
    """
    pairs = list(named)
    total = 0
    for (name, _), value in zip(pairs, tensor_sums([tensor for _, tensor in pairs]), strict=True):
        total += (value * salt(name)) & MASK
    return f"{total & MASK:016x}"


def salt(name: str) -> int:
    """What a tensor's sum is multiplied by."""
    # All of the name: `layers.0` and `layers.1` differ in the middle, not in length or ending.
    return (int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") << 1) | 1


def bits_of(tensor: Tensor) -> Tensor:
    """Its elements in a row as integers of the same width: a view where the tensor is contiguous."""
    return tensor.detach().contiguous().view(-1).view(WIDTHS[tensor.element_size()])


def tensor_sums(tensors: Sequence[Tensor]) -> list[int]:
    """sum(bits[i] * mix(i)) mod 2^64 of each tensor, where it lies."""
    if tensors and all(tensor.is_cuda for tensor in tensors):
        from paceline.model import cuda_bits

        return [value & MASK for value in cuda_bits.tensor_sums(tensors)]
    return [tensor_sum(tensor) for tensor in tensors]


def tensor_sum(tensor: Tensor, chunk: int = 1 << 20) -> int:
    """The same for one tensor in plain torch."""
    bits = bits_of(tensor)
    total = 0
    for start in range(0, len(bits), chunk):
        part = bits[start : start + chunk].long()
        total += int((part * _mixed(start, bits.device)[: len(part)]).sum())
    return total & MASK


@functools.lru_cache(maxsize=8)
def _mixed(start: int, device: torch.device, chunk: int = 1 << 20) -> Tensor:
    """mix(i) from `start` on; small models ask for the same few stretches at every publish."""
    return mix(torch.arange(start, start + chunk, device=device, dtype=torch.int64))
