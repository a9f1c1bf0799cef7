"""How fast this CPU is: a matrix product and a copy, for a moment each."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

SIDE = 48
"""So small that no library spreads it over threads, which on busy cores would wait for one another for ever."""
SMALL = 0.67
"""What so small a product reaches of a large one's speed: 23.6 of 35.6 Gflop/s on a Neoverse N1."""
COPIED = 1 << 24
"""Elements of a copy, beyond every cache."""


@dataclass(frozen=True, slots=True)
class Speed:
    """One core's float32 flops, and bytes read plus written, per second."""

    flops: float
    bandwidth: float


@cache
def calibrated(seconds: float) -> Speed:
    """Measured once a process. numpy's products are as fast as torch's, and torch takes seconds to import."""
    import numpy as np

    a, b, product = (np.full((SIDE, SIDE), 0.5, np.float32) for _ in range(3))
    source = np.ones(COPIED, np.float32)
    target = np.zeros_like(source)
    return Speed(
        flops=2 * SIDE**3 / SMALL / _best(lambda: np.matmul(a, b, out=product), seconds / 2),
        bandwidth=2 * source.nbytes / _best(lambda: np.copyto(target, source), seconds / 2),
    )


def _best(work: Callable[[], object], seconds: float) -> float:
    """The quickest of as many calls as fit: threads that wake up and neighbours only ever add."""
    work()
    end, best = time.perf_counter() + seconds, float("inf")
    while (start := time.perf_counter()) < end or best == float("inf"):
        work()
        best = min(best, time.perf_counter() - start)
    return best
