"""What travels from trainer to engine, and how both prove that they hold the same bits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.model.bits import MASK, mix

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The trainable tensors of one policy version, by parameter name.

    In one process the tensors are the trainer's own: whoever publishes must await the engine's copy before training on.
    """

    version: int
    tensors: Mapping[str, Tensor]

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
    total = 0
    for name, tensor in named:
        salt = int.from_bytes(name.encode()[-8:].rjust(8, b"\0"), "big") ^ (len(name) * 0x9E3779B97F4A7C15)
        total += (tensor_sum(tensor) * ((salt << 1) | 1)) & MASK
    return f"{total & MASK:016x}"


def tensor_sum(tensor: Tensor, chunk: int = 1 << 22) -> int:
    """sum(bits[i] * mix(i)) mod 2^64, on the tensor's device."""
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = 0
    for start in range(0, len(bits), chunk):
        part = bits[start : start + chunk].long()
        index = torch.arange(start, start + len(part), device=bits.device, dtype=torch.int64)
        total += int((part * mix(index)).sum())
    return total & MASK
