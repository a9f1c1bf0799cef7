"""Weight updates from trainer to engine, and fingerprints that prove both hold the same bits."""

import functools
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.weights.bits import MASK, mix_array

if TYPE_CHECKING:
    from paceline.weights.delta import WeightDelta

Array = Any
"""A tensor of torch, an array of mlx or of numpy: whatever the trainer computes with."""
STRETCH = 1 << 20
INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
"""By their width in bytes."""
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

    def gap(self, logprobs: Sequence[float]) -> float:
        """Mean absolute difference from those of the same tokens elsewhere."""
        apart = (abs(a - b) for a, b in zip(logprobs, self.logprobs, strict=True))
        return sum(apart) / max(1, len(logprobs) - 1)


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The trainable tensors of one policy version, by parameter name.

    In one process the tensors are the trainer's own: the publisher must await the engine's copy before training on.
    """

    version: int
    tensors: Mapping[str, Array]
    adapter: Adapter | None = None
    """Set when the tensors are an adapter's: names end in `lora_A.weight` and `lora_B.weight`."""
    expected: str | None = None
    """The sender's fingerprint of these tensors; an engine that holds others refuses the update."""
    canary: Canary | None = None
    delta: "WeightDelta | None" = None
    """The way here from an earlier version: an engine that holds that one may take it in place of the tensors, which
    are then empty or read only by those who need them."""

    @property
    def names(self) -> Collection[str]:
        """Of all tensors it stands for, also of those that a delta leaves as they are."""
        return self.tensors.keys() if self.delta is None else self.delta.entries.keys()

    def fingerprint(self) -> str:
        return fingerprint(self.tensors.items())


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """The version and the weights that an engine really serves."""

    version: int
    fingerprint: str


def fingerprint(named: Iterable[tuple[str, Array]]) -> str:
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
    """The factor of a tensor's sum."""
    # All of the name: `layers.0` and `layers.1` differ in the middle, not in length or ending.
    return (int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") << 1) | 1


def host_bits(array: Array) -> NDArray:
    """Its elements in a row as integers of the same width, in the host's memory: a view where it lies there already."""
    if type(array).__module__.partition(".")[0] == "torch":
        from paceline.weights.torch_bits import bits_of

        return bits_of(array).cpu().numpy()
    if type(array).__module__.partition(".")[0] == "mlx":
        from paceline.weights.mlx_arrays import bits_of

        return bits_of(array)
    return np.ascontiguousarray(array).reshape(-1).view(INTEGERS[array.itemsize])


def tensor_sums(tensors: Sequence[Array]) -> list[int]:
    """sum(bits[i] * mix(i)) mod 2^64 of each tensor; on a GPU where it lies.

    On the host the scrambled indices cost more than the sums. So a stretch of them is made once for all tensors, and
    both are done in pieces that stay in a core's cache, by numpy, which wakes no threads for each.
    """
    if tensors and all(getattr(tensor, "is_cuda", False) for tensor in tensors):
        from paceline.weights import cuda_bits

        return [value & MASK for value in cuda_bits.tensor_sums(tensors)]
    rows = [host_bits(tensor) for tensor in tensors]
    totals = [0] * len(rows)
    for start in range(0, max(map(len, rows), default=0), STRETCH):
        for number, row in enumerate(rows):
            if start < len(row):
                totals[number] += _stretch_sum(row[start : start + STRETCH], start)
    return [total & MASK for total in totals]


def _stretch_sum(bits: NDArray, start: int) -> int:
    factors, wide = _mixed(start), np.empty(PIECE, np.int64)
    total = 0
    for low in range(0, len(bits), PIECE):
        piece = bits[low : low + PIECE]
        wide[: len(piece)] = piece
        total += int(np.dot(wide[: len(piece)], factors[low : low + len(piece)]))
    return total


@functools.lru_cache(maxsize=8)
def _mixed(start: int) -> NDArray[np.int64]:
    """mix(i) for a stretch from `start` on; small models ask for the same few at every publish."""
    out = np.empty(STRETCH, np.uint64)
    for low in range(0, STRETCH, PIECE):
        out[low : low + PIECE] = mix_array(np.arange(start + low, start + low + PIECE, dtype=np.uint64))
    return out.view(np.int64)
