"""Keys of noise streams: sampling noise is a pure function of a key and a token's number, on every device the same."""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline.model.bits import MASK, mix_array, mix_int


def noise_key(*parts: int) -> int:
    """One 64-bit key from (run seed, ticket, member, turn, ...), as a signed integer that fits a tensor."""
    key = _mixed(_of_group(parts[:-2]), parts[-2:])
    return key - (1 << 64) if key >= 1 << 63 else key


def _mixed(key: int, parts: Iterable[int]) -> int:
    for part in parts:
        key = mix_int(key ^ mix_int(part & MASK))
    return key


@lru_cache(maxsize=4096)
def _of_group(parts: tuple[int, ...]) -> int:
    """What the keys of a group's episodes have in common."""
    return _mixed(0, parts)


def uniform_array(keys: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in [0, 1) for each (key, token index), on the host."""
    bits = mix_array(keys.astype(np.uint64) ^ mix_array(indices.astype(np.uint64)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
