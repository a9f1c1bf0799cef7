"""The cost model: a roofline for decoding, model flops for training.

The plan of a simulation (a dense transformer in bf16, some GPUs, how they are split, and how the run is set) holds the
whole physics of the simulator. It leaves out what is particular to a kernel or a network, and has three factors
(`bandwidth_used`, `flops_used`, `mfu`) to be set from a measurement of one's own.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist

from paceline.config import CheckpointConfig, EvalConfig, RecordConfig, RunConfig
from paceline.config.algorithm import GRPOConfig, RewardConfig
from paceline.config.env import CustomEnvConfig
from paceline.config.hardware import CARDS as KNOWN
from paceline.config.hardware import HardwareSpec
from paceline.config.inference import SamplingConfig
from paceline.errors import PacelineError

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """A log-normal distribution, cut off where the run cuts replies off. Moments are sums over quantiles, so that they
    hold for what is really drawn."""

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


CARDS = {"a100": KNOWN["a100-80"], "h100": KNOWN["h100"], "h200": KNOWN["h200"]}


NAME = "simulated"


@dataclass(frozen=True, kw_only=True)
class SimulationPlan:
    """One simulated run.

    `bundle` rollouts of the plan are one rollout of the simulation: all of them are equally long and are in different
    groups. Batches, places and requests in flight are divided by it; groups, staleness and the gate are as they are.
    """

    parameters: float = 7e9
    kv_per_parameter: float = 8.2e-6
    """Bytes of keys and values of one token, by parameter: 57 kB at 7B and 262 kB at 32B, as in Qwen 2.5."""
    card: HardwareSpec = CARDS["h100"]
    gpus: int = 1000
    sampling_gpus: int = 700
    cards_per_engine: int = 1
    lengths: Lengths = field(default_factory=Lengths)
    prompt: int = 512
    staleness: int = 8
    batch: int = 32_768
    group: int = 8
    concurrency: int = 64
    """Requests an engine decodes at once, where its memory holds so many."""
    max_inflight: int | None = None
    """As in a run file. A rollout counts until its whole group is done, so this should be well above what the engines
    decode at once: about the slowest of a group over the mean, times as many."""
    transfer: float = 2.0
    """Seconds a publish takes while decoding goes on."""
    pause: float = 0.5
    """And while it stands still."""
    bandwidth_used: float = 0.7
    flops_used: float = 0.5
    mfu: float = 0.4
    decode_overhead: float = 0.004
    """Seconds of a decode step that are neither reading nor multiplying: launches, sampling, the host."""
    train_overhead: float = 2.0
    """Seconds of a step that do not shrink with more GPUs: packing, the optimizer, waiting for the last rank."""
    bundle: int = 64
    engines: int = 16
    """The sampling GPUs are simulated as so many engines, each with an equal share of them."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.sampling_gpus < self.gpus:
            raise PacelineError(f"{self.sampling_gpus} of {self.gpus} GPUs sample: leave some for each side")
        if self.batch % (self.bundle * self.group):
            raise PacelineError(
                f"a batch of {self.batch} rollouts is no whole number of groups of {self.group}, bundled by "
                f"{self.bundle}: give a multiple of {self.bundle * self.group}"
            )
        if not self.slots:
            raise PacelineError(
                f"{self.cards_per_engine} GPU(s) do not hold the model and one request: raise cards_per_engine"
            )

    @cached_property
    def context(self) -> float:
        """Tokens of an average running request."""
        return self.prompt + self.lengths.progress

    @cached_property
    def replicas(self) -> float:
        """Real engines that one simulated engine stands for."""
        return self.sampling_gpus / self.cards_per_engine / self.engines

    @cached_property
    def slots(self) -> int:
        """Requests of one real engine."""
        return min(self.concurrency, self.room(self.context))

    @property
    def bundled_slots(self) -> int:
        """Bundles that one simulated engine decodes at once."""
        return max(1, round(self.slots * self.replicas / self.bundle))

    def room(self, context: float) -> int:
        """Requests of so many tokens that fit beside the weights of one engine."""
        free = 0.9 * self.card.memory * self.cards_per_engine - 2 * self.parameters
        return max(0, int(free / (self.kv_per_parameter * self.parameters * context)))

    def decode_seconds(self, requests: float, context: float) -> float:
        """One token for each request of an engine: weights are read once, keys and values of every request besides,
        and each token takes 2 flops per parameter; whichever of reading and multiplying takes longer."""
        size = 2 * self.parameters + requests * context * (self.kv_per_parameter * self.parameters)
        read = size / (self.card.bandwidth * self.cards_per_engine)
        multiply = 2 * self.parameters * requests / (self.card.flops * self.cards_per_engine)
        return max(read / self.bandwidth_used, multiply / self.flops_used) + self.decode_overhead

    def step_seconds(self, bundles: int) -> float:
        """One decode step of a simulated engine. Prompts are computed as fast as replies are finished: for each token
        of a reply, its share of the prompt."""
        requests = bundles * self.bundle / self.replicas
        prefill = 2 * self.parameters * self.prompt / (self.card.flops * self.cards_per_engine * self.flops_used)
        return self.decode_seconds(requests, self.context) + prefill * requests / self.lengths.mean

    def train_seconds(self, tokens: float) -> float:
        """Forward 2, backward 4 and the recomputed forward 2 flops per parameter and token."""
        cards = self.gpus - self.sampling_gpus
        return 8 * self.parameters * tokens / (self.card.flops * cards * self.mfu) + self.train_overhead

    def config(self) -> RunConfig:
        """The run file of it."""
        return RunConfig(
            seed=self.seed,
            steps=1_000_000,
            batch_size=self.batch // self.bundle,
            group_size=self.group,
            algo=GRPOConfig() if self.group > 1 else RewardConfig(),
            staleness=self.staleness,
            max_inflight=None if self.max_inflight is None else self.max_inflight // self.bundle,
            sampling=SamplingConfig(max_tokens=self.lengths.longest),
            env=[CustomEnvConfig(name=NAME, import_path="simulated:unused", timeout=1e9)],
            eval=EvalConfig(every=0),
            checkpoint=CheckpointConfig(every=0),
            record=RecordConfig(rollouts=0),
        )
