"""The plan of a simulation: a model, a number of GPUs, how they are split, and how the run is set."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from paceline.config import CheckpointConfig, EvalConfig, RecordConfig, RunConfig
from paceline.config.algorithm import GRPOConfig, RewardConfig
from paceline.config.env import CustomEnvConfig
from paceline.config.inference import SamplingConfig
from paceline.errors import PacelineError
from paceline.simulate.cost import CARDS, Decoder, Lengths, Model, SimulatedGpu, TrainingGpus

NAME = "simulated"


@dataclass(frozen=True, kw_only=True)
class SimulationPlan:
    """One simulated run.

    `bundle` rollouts of the plan are one rollout of the simulation: all of them are equally long and are in different
    groups. Batches, places and requests in flight are divided by it; groups, staleness and the gate are as they are.
    """

    model: Model = field(default_factory=lambda: Model(7e9))
    card: SimulatedGpu = CARDS["h100"]
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
