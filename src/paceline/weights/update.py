"""Weight updates from trainer to engine, and fingerprints that prove both hold the same bits.

Fingerprints and sampling noise are made of counter-based bits: integer hashing that is the same on every device, with
no generator and no state.
"""

import functools
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.weights.delta import WeightDelta

Array = Any
"""A tensor of torch, an array of mlx or of numpy: whatever the trainer computes with."""
MASK = (1 << 64) - 1
STRETCH_ELEMENTS = 1 << 20
INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""Integer types of every library by their width in bytes."""
PIECE_ELEMENTS = 1 << 14
"""Elements: 128 KiB of factors, and as much again for what they are multiplied with."""
CANARY_LENGTH = 24
TOLERANCE = 1e-3
HALF_TOLERANCE = 0.1
"""Half precision rounds differently in every kernel; wrong weights are off by more than this."""
POLICY_MODEL = ""
"""The served model that is trained, among all served by name."""
BASE_MODEL = "base"
"""The plain base model, where the policy is an adapter."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter an update carries instead of the model's own weights."""

    name: str
    """The model name requests choose it by: `POLICY_MODEL` for the adapter in training."""
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


def canary_ids(vocabulary: int) -> tuple[int, ...]:
    """The canary's tokens, always the same for a vocabulary."""
    return tuple(mix_int(place) % vocabulary for place in range(CANARY_LENGTH))


def canary_of(ids: tuple[int, ...], logprobs: Sequence[float], dtype: Any) -> Canary:
    """A canary of these tokens, with the log probabilities of a model that computes in this type."""
    return Canary(ids, tuple(logprobs), max(TOLERANCE, dtype_tolerance(dtype)))


def dtype_tolerance(dtype: Any) -> float:
    """The tolerance between two parties with the same weights, of which one computes in this type of torch or mlx."""
    return 0.0 if str(dtype).rpartition(".")[2] in ("float32", "float64") else HALF_TOLERANCE


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


def fingerprint(named_tensors: Iterable[tuple[str, Array]]) -> str:
    """A sum over tensors of sum(bits[i] * mix(i)) mod 2^64, as hex.

    Additive over elements with their global index, so shards combine by sum. The name's hash enters each tensor's sum,
    so two tensors cannot trade places unseen.
    """
    pairs = list(named_tensors)
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
    library = type(array).__module__.partition(".")[0]
    if library == "torch":
        return bits_of(array).cpu().numpy()
    if library == "mlx":
        from paceline.weights import mlx_arrays

        return mlx_arrays.bits_of(array)
    return np.ascontiguousarray(array).reshape(-1).view(INTEGERS[array.itemsize])


def bits_of(tensor: "Tensor") -> "Tensor":
    """A torch tensor's elements in a row as integers of the same width: a view where the tensor is contiguous."""
    import torch

    return tensor.detach().contiguous().view(-1).view(getattr(torch, INTEGERS[tensor.element_size()]))


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
    for start in range(0, max(map(len, rows), default=0), STRETCH_ELEMENTS):
        for number, row in enumerate(rows):
            if start < len(row):
                totals[number] += _stretch_sum(row[start : start + STRETCH_ELEMENTS], start)
    return [total & MASK for total in totals]


def _stretch_sum(bits: NDArray, start: int) -> int:
    factors, wide = _index_factors(start), np.empty(PIECE_ELEMENTS, np.int64)
    total = 0
    for low in range(0, len(bits), PIECE_ELEMENTS):
        piece = bits[low : low + PIECE_ELEMENTS]
        wide[: len(piece)] = piece
        total += int(np.dot(wide[: len(piece)], factors[low : low + len(piece)]))
    return total


@functools.lru_cache(maxsize=8)
def _index_factors(start: int) -> NDArray[np.int64]:
    """mix(i) for a stretch from `start` on; small models ask for the same few at every publish."""
    out = np.empty(STRETCH_ELEMENTS, np.uint64)
    for low in range(0, STRETCH_ELEMENTS, PIECE_ELEMENTS):
        out[low : low + PIECE_ELEMENTS] = mix_array(
            np.arange(start + low, start + low + PIECE_ELEMENTS, dtype=np.uint64)
        )
    return out.view(np.int64)


# -- counter-based bits: the finaliser of splitmix64, a bijective scramble of 64 bits ----------------------------------


def mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble numpy's integers in place."""
    x += np.uint64(0x9E3779B97F4A7C15)
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(bits)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


def mix_int(x: int) -> int:
    """The same for one Python integer, as an unsigned 64-bit value."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def mix_tensor(x: "Tensor") -> "Tensor":
    """The same for torch's int64, whose constants must be signed."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ shift_right(x, 31)


def shift_right(x: "Tensor", bits: int) -> "Tensor":
    """Logical right shift of int64, which torch shifts arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def noise_key(*parts: int) -> int:
    """One 64-bit key from (run seed, ticket, member, turn, ...), as a signed integer that fits a tensor. Sampling noise
    is a pure function of this key and a token's number."""
    return _signed(_fold_key(_group_key(parts[:-2]), parts[-2:]))


def _fold_key(key: int, parts: Iterable[int]) -> int:
    for part in parts:
        key = mix_int(key ^ mix_int(part & MASK))
    return key


@functools.lru_cache(maxsize=4096)
def _group_key(parts: tuple[int, ...]) -> int:
    """What the keys of a group's episodes have in common."""
    return _fold_key(0, parts)


def uniform_array(keys: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in [0, 1) for each (key, token index), on the host."""
    bits = mix_array(keys.astype(np.uint64) ^ mix_array(indices.astype(np.uint64)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
