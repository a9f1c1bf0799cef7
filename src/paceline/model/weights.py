"""What travels from trainer to engine, and how both prove that they hold the same bits."""

import functools
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paceline.model.bits import MASK, mix, mix_array

if TYPE_CHECKING:
    from paceline.model.delta import Delta

WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their width in bytes."""
STRETCH = 1 << 20
PIECE = 1 << 14
"""Elements: 128 KiB of factors, and as much again for what they are multiplied with."""


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
    """sum(bits[i] * mix(i)) mod 2^64 of each tensor, where it lies.

    On the host the scrambled indices cost more than the sums. So a stretch of them is made once for all tensors, and
    both are done in pieces that stay in a core's cache, by numpy, which wakes no threads for each.
    """
    if tensors and all(tensor.is_cuda for tensor in tensors):
        from paceline.model import cuda_bits

        return [value & MASK for value in cuda_bits.tensor_sums(tensors)]
    rows = [bits_of(tensor) for tensor in tensors]
    totals = [0] * len(rows)
    for start in range(0, max(map(len, rows), default=0), STRETCH):
        for number, row in enumerate(rows):
            if start < len(row):
                totals[number] += _stretch_sum(row[start : start + STRETCH], start)
    return [total & MASK for total in totals]


def _stretch_sum(row: Tensor, start: int) -> int:
    mixed = _mixed(start, row.device)[: len(row)]
    if row.device.type != "cpu":  # where few large steps are fast, and integers have no dot
        return int((row.long() * mixed).sum())
    bits, factors, wide = row.numpy(), mixed.numpy(), np.empty(PIECE, np.int64)
    total = 0
    for low in range(0, len(bits), PIECE):
        piece = bits[low : low + PIECE]
        wide[: len(piece)] = piece
        total += int(np.dot(wide[: len(piece)], factors[low : low + PIECE]))
    return total


@functools.lru_cache(maxsize=8)
def _mixed(start: int, device: torch.device) -> Tensor:
    """mix(i) for a stretch from `start` on; small models ask for the same few at every publish."""
    if device.type != "cpu":
        return mix(torch.arange(start, start + STRETCH, device=device, dtype=torch.int64))
    out = np.empty(STRETCH, np.uint64)
    for low in range(0, STRETCH, PIECE):
        out[low : low + PIECE] = mix_array(np.arange(start + low, start + low + PIECE, dtype=np.uint64))
    return torch.from_numpy(out.view(np.int64))
