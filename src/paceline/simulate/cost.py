"""The cost model: a roofline for decoding, model flops for training.

These few lines are the whole physics of the simulator. They leave out what is particular to a kernel or a network, and
have three factors (`bandwidth_used`, `flops_used`, `mfu`) to be set from a measurement of one's own.

The plan of a simulation: a model, a number of GPUs, how they are split, and how the run is set.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist
from typing import Self

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


CARDS = {"a100": KNOWN["a100-80"], "h100": KNOWN["h100"], "h200": KNOWN["h200"]}


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
    card: HardwareSpec
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
    card: HardwareSpec
    cards: int
    mfu: float = 0.4
    overhead: float = 2.0
    """Seconds of a step that do not shrink with more GPUs: packing, the optimizer, waiting for the last rank."""

    def step_seconds(self, tokens: float) -> float:
        """Forward 2, backward 4 and the recomputed forward 2 flops per parameter and token."""
        return 8 * self.model.parameters * tokens / (self.card.flops * self.cards * self.mfu) + self.overhead


NAME = "simulated"


@dataclass(frozen=True, kw_only=True)
class SimulationPlan:
    """One simulated run.

    `bundle` rollouts of the plan are one rollout of the simulation: all of them are equally long and are in different
    groups. Batches, places and requests in flight are divided by it; groups, staleness and the gate are as they are.
    """

    model: Model = field(default_factory=lambda: Model(7e9))
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
    mfu: float = 0.4
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

    def split(self, sampling_gpus: int) -> Self:
        return replace(self, sampling_gpus=sampling_gpus)

    @cached_property
    def context(self) -> float:
        """Tokens of an average running request."""
        return self.prompt + self.lengths.progress

    @cached_property
    def decoder(self) -> Decoder:
        return Decoder(model=self.model, card=self.card, cards=self.cards_per_engine)

    @cached_property
    def learner(self) -> TrainingGpus:
        return TrainingGpus(model=self.model, card=self.card, cards=self.gpus - self.sampling_gpus, mfu=self.mfu)

    @cached_property
    def replicas(self) -> float:
        """Real engines that one simulated engine stands for."""
        return self.sampling_gpus / self.cards_per_engine / self.engines

    @cached_property
    def slots(self) -> int:
        """Requests of one real engine."""
        return min(self.concurrency, self.decoder.room(self.context))

    @cached_property
    def bundled_slots(self) -> int:
        """Bundles that one simulated engine decodes at once."""
        return max(1, round(self.slots * self.replicas / self.bundle))

    def step_seconds(self, bundles: int) -> float:
        """One decode step of a simulated engine. Prompts are computed as fast as replies are finished: for each token
        of a reply, its share of the prompt."""
        requests = bundles * self.bundle / self.replicas
        prefill = self.decoder.prefill_seconds(self.prompt) * requests / self.lengths.mean
        return self.decoder.step_seconds(requests, self.context) + prefill

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
