"""Self-play in a few lines of Python, without a run file: an arena, a trainer, and a loop between them.

    model, tokenizer = load("paceline:quickstart")
    optimizer = optim.Adam(learning_rate=1e-5)
    config = SelfPlayTrainerConfig(micro_batch_tokens=4096, staleness_limit=3)

    client = OpenAIClient(base_url="http://localhost:8000/v1")      # paceline serve NAME --engine.adapters 1
    trainer = SelfPlayTrainer(model, optimizer, config, client)
    arena = MyArena(client, credit_assigner=GRPOCredit())

    await training_loop(arena=arena, trainer=trainer, num_steps=1000, episode_concurrency=8)

The parts are those of a run: seats record exact tokens, algorithms give credit, the trainer steps. What a run adds
(evaluation, checkpoints, metrics on disk, resume) needs a run file with an `arena` environment.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from paceline.algorithms import Algorithm
from paceline.algorithms.baselines import RAE, Constant
from paceline.algorithms.grpo import Hierarchical
from paceline.clients import HttpEngine, Pool
from paceline.config import BreakerConfig
from paceline.config import algorithm as credit
from paceline.config import trainer as sections
from paceline.config.env.base import ArenaEnvConfig
from paceline.config.hardware import uses_mlx
from paceline.config.inference import SamplingConfig
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.data import Cursor, Sample, Ticket
from paceline.errors import PacelineError
from paceline.model import end_tokens, load_tokenizer
from paceline.orchestrator import Breaker, Clock, TrainEnv
from paceline.orchestrator.admission import has_no_signal
from paceline.orchestrator.episodes import RolloutRunner
from paceline.orchestrator.gate import limit_staleness
from paceline.rollout import Group, Renderer, Rollout, SamplingClient
from paceline.runtime.local import trainer_of
from paceline.selfplay import Arena, ArenaEnvironment, ArenaError, EpisodeRequest
from paceline.trainer import StepReport
from paceline.util.deadlines import gather_or_cancel
from paceline.util.lazy_import import renamed_getattr

__all__ = [
    "Client",
    "ConstantCredit",
    "GRPOCredit",
    "OpenAIClient",
    "RAECredit",
    "SelfPlayTrainer",
    "SelfPlayTrainerConfig",
    "Stage",
    "TrainingBatch",
    "load",
    "optim",
    "synchronous_training_loop",
    "training_loop",
]

__getattr__ = renamed_getattr(__name__, {"Trainer": "SelfPlayTrainer", "TrainerConfig": "SelfPlayTrainerConfig"})


ADAPTER = LoRAConfig()


def load(
    name: str, lora: LoRAConfig | None = ADAPTER, seed: int = 0, backend: str = "auto"
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model ready to train, of torch or of mlx, with its tokenizer; `lora = None` trains all of it."""
    config = ModelConfig(name=name, lora=lora)
    if uses_mlx(backend):
        from paceline.model.mlx import loading
        from paceline.model.mlx import lora as adapters

        return adapters.attach_lora(loading.load_model(config), lora, seed), load_tokenizer(config)
    from paceline.model import attach_lora, load_model

    return attach_lora(load_model(config), config, seed), load_tokenizer(config)


class Client:
    """A pool of engines that actors are sampled from."""

    def __init__(self, pool: Pool, sampling: SamplingConfig | None = None) -> None:
        self.pool = pool
        self._sampling = sampling or SamplingConfig()
        self._sampling_client: SamplingClient | None = None

    def connect(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """From now on speak in this model's template. A `Trainer` does this for its client."""
        ends = end_tokens(tokenizer, model)
        self._sampling_client = SamplingClient(self.pool, Renderer(tokenizer, ends), self._sampling, frozenset(ends))

    @property
    def sampling_client(self) -> SamplingClient:
        if self._sampling_client is None:
            raise PacelineError("this client does not know the model's template yet: make the SelfPlayTrainer first")
        return self._sampling_client


class OpenAIClient(Client):
    """A running `paceline serve`. Adapters are sent to it over HTTP; full weights as a file in `folder`, which it must
    `--allow`. It takes weights from the holder of its key: `PACELINE_API_KEY` when left out, as the server's own."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        folder: Path | None = None,
        sampling: SamplingConfig | None = None,
    ) -> None:
        self._engine = HttpEngine(base_url, api_key=api_key or os.environ.get("PACELINE_API_KEY"), folder=folder)
        super().__init__(Pool([self._engine]), sampling)

    async def aclose(self) -> None:
        """Close the connections."""
        self.pool.close()
        await self._engine.aclose()


def Adam(learning_rate: float = 1e-5) -> sections.OptimizerConfig:
    """Adam with float32 masters."""
    return sections.OptimizerConfig(lr=learning_rate)


optim = SimpleNamespace(Adam=Adam)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfPlayTrainerConfig:
    """Settings of a `SelfPlayTrainer`."""

    micro_batch_tokens: int = 4096
    min_samples_per_step: int = 16
    """Fresh samples that make an optimizer step."""
    loss_type: Literal["token", "sample"] = "token"
    ppo_clip_min: float = 0.8
    ppo_clip_max: float = 1.2
    staleness_limit: int = 3
    """Versions a sample's oldest token may be behind; older ones are left out and counted."""
    kl_coef: float = 0.1
    use_kl_penalty: bool = False

    def __post_init__(self) -> None:
        if self.use_kl_penalty:
            raise PacelineError("use_kl_penalty = True: the trainer has no KL reference yet, so leave it at False")

    def section(self, optimizer: sections.OptimizerConfig) -> sections.TrainerConfig:
        loss = sections.PPOConfig(clip_low=1 - self.ppo_clip_min, clip_high=self.ppo_clip_max - 1)
        budget = self.micro_batch_tokens
        return sections.TrainerConfig(
            optimizer=optimizer, loss=loss, normalise=self.loss_type, micro_batch_tokens=budget
        )


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """One draw of the arena, played and credited."""

    records: list[Sample]
    """Samples to train on. Groups in which all did equally well carry no signal and are left out."""
    groups: list[Group]

    def rewards(self) -> dict[str, float]:
        """Mean reward of each actor."""
        played: dict[str, list[float]] = {}
        for rollout in (rollout for group in self.groups for rollout in group.rollouts):
            played.setdefault(rollout.actor, []).append(rollout.reward or 0.0)
        return {actor: sum(rewards) / len(rewards) for actor, rewards in played.items()}


class SelfPlayTrainer:
    """Takes samples, steps when there are enough, and publishes each new version to its client."""

    def __init__(
        self,
        model: Any,
        optimizer: sections.OptimizerConfig,
        config: SelfPlayTrainerConfig,
        client: Client,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.config, self.client = config, client
        self.stale = 0
        """Samples left out because they were too old."""
        self.tickets = count()
        """Numbers what is drawn, so that no two draws of this trainer share their noise."""
        self.reports: list[StepReport] = []
        self._trainer = trainer_of(model, config.section(optimizer))
        self._waiting: list[Sample] = []
        client.connect(model, tokenizer or load_tokenizer(ModelConfig(name=str(model.name_or_path))))

    @property
    def version(self) -> int:
        return self._trainer.version

    async def accumulate(self, records: Sequence[Sample]) -> StepReport | None:
        """Take samples in; a step when `min_samples_per_step` fresh ones are there, else None.

        They wait as samples, not as gradients: the step's normaliser counts all of its tokens, and what grew stale
        while it waited can still be left out.
        """
        self._add_waiting(records)
        return await self._step() if len(self._waiting) >= self.config.min_samples_per_step else None

    async def train_step(self, batch: TrainingBatch) -> StepReport | None:
        """Exactly one step on this batch and whatever waits; None if nothing fresh is there."""
        self._add_waiting(batch.records)
        return await self._step() if self._waiting else None

    async def publish_weights(self) -> None:
        """Publish the current version to the client's engines."""
        await self.client.pool.load_weights(await self._trainer.weights())

    async def flush(self) -> StepReport | None:
        """Train what is left over, however little it is."""
        return await self.train_step(TrainingBatch([], []))

    def close(self) -> None:
        self._trainer.close()

    def _add_waiting(self, records: Sequence[Sample]) -> None:
        """Add samples to those that wait, and leave out what is too old by now."""
        found = [*self._waiting, *records]
        aged = [limit_staleness(sample, self.version, self.config.staleness_limit, "drop") for sample in found]
        self._waiting = [sample for sample in aged if sample is not None]
        self.stale += len(aged) - len(self._waiting)

    async def _step(self) -> StepReport:
        batch, self._waiting = self._waiting, []
        report = await self._trainer.step(batch)
        self.reports.append(report)
        await self.publish_weights()
        return report


def GRPOCredit(normalize: bool = False, positive_only: bool = False) -> Algorithm:
    """Reward minus the mean of those who played the same thing: tries of one artifact, children of one episode."""
    return Hierarchical(
        credit.HierarchicalConfig(std="population" if normalize else "none", positive_only=positive_only)
    )


def RAECredit(decay: float = 0.95) -> Algorithm:
    """Reward minus a running mean for each actor in each kind of episode."""
    return RAE(credit.RAEConfig(decay=decay))


def ConstantCredit(value: float = 1.0) -> Algorithm:
    return Constant(credit.ConstantConfig(value=value))


EPISODE_SECONDS = 600.0


class Stage:
    """Plays what an arena asks for. Requests of one episode type and artifact form a group."""

    def __init__(self, arena: Arena, trainer: SelfPlayTrainer, seed: int = 0) -> None:
        if not isinstance(arena.credit_assigner, Algorithm):
            raise ArenaError("the arena has no credit_assigner: give it GRPOCredit(), RAECredit() or ConstantCredit()")
        self._arena, self._tickets = arena, trainer.tickets
        self._runner = RolloutRunner((arena.client or trainer.client).sampling_client, Clock(), seed)
        self._breaker = Breaker(BreakerConfig())
        self._env = TrainEnv(
            config=ArenaEnvConfig(name="arena", import_path="paceline.selfplay:Arena", timeout=EPISODE_SECONDS),
            environment=ArenaEnvironment(arena),
            algorithm=arena.credit_assigner,
            rows=(),
            eval_rows=(),
            cursor=Cursor(1, seed, "arena"),
        )

    async def step(self, concurrency: int = 8) -> TrainingBatch:
        """One batch of the arena, at most `concurrency` root episodes at once."""
        tries: dict[tuple[str, str], list[EpisodeRequest]] = {}
        for request in self._arena.get_batch():
            tries.setdefault(request.key, []).append(request)
        if not tries:
            raise ArenaError(f"{type(self._arena).__name__} has nothing to play: its get_batch() gave no request")
        semaphore = asyncio.Semaphore(concurrency)
        groups = await gather_or_cancel([self._group(requests, semaphore) for requests in tries.values()])
        for group in groups:
            for rollout in (*group.failed, *group.rollouts):
                if rollout.error is None:
                    self._breaker.record_success()
                elif not rollout.dropped:
                    self._breaker.record_failure(rollout.error)
            self._env.algorithm.assign(group)
        telling = [group for group in groups if not has_no_signal(group)]
        await self._env.algorithm.finish_batch(telling)
        return TrainingBatch([sample for group in telling for sample in group.samples()], groups)

    async def _group(self, requests: Sequence[EpisodeRequest], semaphore: asyncio.Semaphore) -> Group:
        number = next(self._tickets)
        ticket = Ticket(number, self._env.name, 0, number, 0)

        async def one(member: int, request: EpisodeRequest) -> list[Rollout]:
            async with semaphore:  # bounded: each episode before it has a timeout
                row = {"split": "train", "request": request}
                return await self._runner.run_episode(self._env, row, ticket, member, number)

        episodes = await gather_or_cancel([one(member, request) for member, request in enumerate(requests)])
        return self._runner.collect(self._env, ticket, episodes, len(requests))


async def training_loop(
    arena: Arena,
    trainer: SelfPlayTrainer,
    num_steps: int,
    episode_concurrency: int = 8,
    batch_queue: "asyncio.Queue[TrainingBatch] | None" = None,
) -> None:
    """Generate and train at the same time. The queue gives backpressure: when it is full, generation waits."""
    queue = batch_queue or asyncio.Queue(maxsize=1)
    stage = Stage(arena, trainer)
    await trainer.publish_weights()

    async def generator() -> None:
        for _ in range(num_steps):
            batch = await stage.step(concurrency=episode_concurrency)
            await queue.put(batch)  # unbounded: it is the trainer's turn, and its failure cancels this

    async def consumer() -> None:
        for _ in range(num_steps):
            batch = await queue.get()  # unbounded: it is the sampler's turn, and its failure cancels this
            await trainer.accumulate(batch.records)

    await gather_or_cancel([generator(), consumer()])
    await trainer.flush()


async def synchronous_training_loop(arena: Arena, trainer: SelfPlayTrainer, num_steps: int) -> None:
    """Generate, then train, then again."""
    stage = Stage(arena, trainer)
    await trainer.publish_weights()
    for _ in range(num_steps):
        await trainer.train_step(await stage.step())
