"""The cost model: a roofline for decoding, model flops for training.

These few lines are the whole physics of the simulator. They leave out what is particular to a kernel or a network, and
have three factors (`bandwidth_used`, `flops_used`, `mfu`) to be set from a measurement of one's own.
"""

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
        """Tokens a running request has behind it, on average: E[L^2] / (2 E[L]). At a random
        moment long ones are more frequent, because they run longer."""
        return sum(n * n for n in self._quantiles) / (2 * sum(self._quantiles))


@dataclass(frozen=True, slots=True)
class SimulatedGpu:
    """One GPU by its data sheet: dense bf16 flops, bytes per second, bytes."""

    flops: float
    bandwidth: float
    memory: float


CARDS = {
    "a100": SimulatedGpu(312e12, 2.04e12, 80e9),
    "h100": SimulatedGpu(989e12, 3.35e12, 80e9),
    "h200": SimulatedGpu(989e12, 4.8e12, 141e9),
}


@dataclass(frozen=True, slots=True)
class Model:
    """A dense transformer in bf16."""

    parameters: float
    kv_per_parameter: float = 8.2e-6
    """Bytes of keys and values of one token, by parameter: 57 kB at 7B and 262 kB at 32B, as in Qwen 2.5."""

    @property
    def bytes(self) -> float:
        return 2 * self.parameters

    @property
    def kv_bytes(self) -> float:
        return self.kv_per_parameter * self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """One engine: a model over `cards` GPUs."""

    model: Model
    card: SimulatedGpu
    cards: int = 1
    bandwidth_used: float = 0.7
    flops_used: float = 0.5
    overhead: float = 0.004
    """Seconds of a decode step that are neither: launches, sampling, the host."""

    def room(self, context: float) -> int:
        """Requests of so many tokens that fit beside the weights."""
        free = 0.9 * self.card.memory * self.cards - self.model.bytes
        return max(0, int(free / (self.model.kv_bytes * context)))

    def step_seconds(self, requests: float, context: float) -> float:
        """One token for each request: whichever of reading and multiplying takes longer.

        All weights are read once, keys and values of every request besides; each token takes 2 flops per parameter.
        """
        read = (self.model.bytes + requests * context * self.model.kv_bytes) / (self.card.bandwidth * self.cards)
        multiply = 2 * self.model.parameters * requests / (self.card.flops * self.cards)
        return max(read / self.bandwidth_used, multiply / self.flops_used) + self.overhead

    def prefill_seconds(self, prompt: float) -> float:
        return 2 * self.model.parameters * prompt / (self.card.flops * self.cards * self.flops_used)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingGpus:
    """The training GPUs, all of them together."""

    model: Model
    card: SimulatedGpu
    cards: int
    mfu: float = 0.4
    overhead: float = 2.0
    """Seconds of a step that do not shrink with more GPUs: packing, the optimizer, waiting for the last rank."""

    def step_seconds(self, tokens: float) -> float:
        """Forward 2, backward 4 and the recomputed forward 2 flops per parameter and token."""
        return 8 * self.model.parameters * tokens / (self.card.flops * self.cards * self.mfu) + self.overhead
