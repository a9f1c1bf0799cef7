"""Where a value stands on an axis, and which round numbers are written beside it."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Scale:
    """A stretch of numbers on a stretch of pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, most: int) -> list[float]:
        """Round numbers within."""
        rough = (self.high - self.low) / most
        size = 10.0 ** math.floor(math.log10(rough))
        each = next(size * unit for unit in (1, 2, 5, 10) if size * unit >= rough * 0.999)
        first = math.ceil(self.low / each - 1e-9)
        return [number * each for number in range(first, math.floor(self.high / each + 1e-9) + 1)]


def around(values: Sequence[float], least: float | None = None) -> tuple[float, float]:
    """Bounds that hold all values and have a length, whatever the values are."""
    low, high = min(values), max(values)
    low = low if least is None else min(least, low)
    room = max(high - low, abs(high) * 1e-3, 1e-9)
    return (low if least is not None and low == least else low - 0.04 * room), high + 0.04 * room


def thinned(points: Points, bins: int) -> Points:
    """At most a lowest and a highest point for each bin, so that no spike is lost."""
    if len(points) <= 2 * bins:
        return points
    edges = [place * len(points) // bins for place in range(bins + 1)]
    found = []
    for first, last in itertools.pairwise(edges):
        part = sorted(points[first:last], key=lambda point: point[1])
        found += sorted({part[0], part[-1]})
    return found
