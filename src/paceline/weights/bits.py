"""Counter-based bits: integer hashing that is the same on every device, with no generator and no state.

Keys of noise streams: sampling noise is a pure function of a key and a token's number, on every device the same.
"""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1


def mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijective scramble of 64 bits, in place: the finaliser of splitmix64."""
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
