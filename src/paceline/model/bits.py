"""Counter-based bits: integer hashing that is the same on every device, with no generator and no state."""

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
