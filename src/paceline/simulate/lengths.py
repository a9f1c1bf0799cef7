"""How long replies are: most short, a few very long."""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """A log-normal distribution, cut off where the run cuts replies off.

    The moments are sums over quantiles, so that they hold for what is really drawn.
    """

    median: float = 4000.0
    spread: float = 0.9
    """Standard deviation of the logarithm: 0 is all alike; reasoning models have about 1."""
    longest: int = 32_768

    def draw(self, noise: int) -> int:
        """The length that belongs to a request's noise: the same request is as long on any engine."""
        return self._at(((noise & ((1 << 64) - 1)) + 0.5) / 2.0**64)

    def _at(self, quantile: float) -> int:
        quantile = min(max(quantile, 1e-12), 1 - 1e-12)
        reached = self.median * math.exp(self.spread * _NORMAL.inv_cdf(quantile))
        return max(1, min(self.longest, round(reached)))

    @cached_property
    def _quantiles(self) -> list[int]:
        return [self._at((i + 0.5) / 4096) for i in range(4096)]

    @cached_property
    def mean(self) -> float:
        return sum(self._quantiles) / len(self._quantiles)

    @cached_property
    def progress(self) -> float:
        """Tokens a running request has behind it, on average: E[L^2] / (2 E[L]). Whoever looks at a random moment finds
        the long ones more often, because they run longer."""
        return sum(n * n for n in self._quantiles) / (2 * sum(self._quantiles))
