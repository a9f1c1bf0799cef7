"""Plays an arena's requests and turns them into credited samples."""

import asyncio
from collections.abc import Sequence

from paceline.algorithms import Algorithm
from paceline.algorithms.baselines import RAE, Constant
from paceline.algorithms.grpo import Hierarchical
from paceline.config import BreakerConfig
from paceline.config import algorithm as config
from paceline.config.env.base import ArenaEnvConfig
from paceline.data import Cursor, Ticket
from paceline.orchestrator import Breaker, RealClock, TrainEnv
from paceline.orchestrator.admission import without_signal
from paceline.orchestrator.episodes import RolloutRunner
from paceline.rollout import Group, Rollout, assemble
from paceline.runtime.selfplay.trainer import SelfPlayTrainer, TrainingBatch
from paceline.selfplay import Arena, ArenaEnvironment, ArenaError, EpisodeRequest
from paceline.util.deadlines import together


def GRPOCredit(normalize: bool = False, positive_only: bool = False) -> Algorithm:
    """Reward minus the mean of those who played the same thing: tries of one artifact, children of one episode."""
    return Hierarchical(
        config.HierarchicalConfig(std="population" if normalize else "none", positive_only=positive_only)
    )


def RAECredit(decay: float = 0.95) -> Algorithm:
    """Reward minus a running mean for each actor in each kind of episode."""
    return RAE(config.RAEConfig(decay=decay))


def ConstantCredit(value: float = 1.0) -> Algorithm:
    return Constant(config.ConstantConfig(value=value))


EPISODE_SECONDS = 600.0


class Stage:
    """Plays what an arena asks for. Requests of one episode type and artifact form a group."""

    def __init__(self, arena: Arena, trainer: SelfPlayTrainer, seed: int = 0) -> None:
        if not isinstance(arena.credit_assigner, Algorithm):
            raise ArenaError("the arena has no credit_assigner: give it GRPOCredit(), RAECredit() or ConstantCredit()")
        self._arena, self._tickets = arena, trainer.tickets
        self._player = RolloutRunner((arena.client or trainer.client).voice, RealClock(), seed)
        self._breaker = Breaker(BreakerConfig())
        self._course = TrainEnv(
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
        places = asyncio.Semaphore(concurrency)
        groups = await together([self._group(requests, places) for requests in tries.values()])
        for group in groups:
            self._judge(group)
        telling = [group for group in groups if not without_signal(group)]
        await self._course.algorithm.score(telling)
        records = [sample for group in telling for sample in group.samples()]
        return TrainingBatch(records, groups)

    async def _group(self, requests: Sequence[EpisodeRequest], places: asyncio.Semaphore) -> Group:
        number = next(self._tickets)
        ticket = Ticket(number, self._course.name, 0, number, 0)

        async def one(member: int, request: EpisodeRequest) -> list[Rollout]:
            async with places:  # bounded: each episode before it has a timeout
                row = {"split": "train", "request": request}
                return await self._player.episode(self._course, row, ticket, member, number)

        episodes = await together([one(member, request) for member, request in enumerate(requests)])
        rollouts = [rollout for episode in episodes for rollout in episode]
        alive = [rollout for rollout in rollouts if rollout.error is None]
        for rollout in alive:
            rollout.samples = assemble(rollout)
            self._course.algorithm.observe(rollout)
        failed = [rollout for rollout in rollouts if rollout.error is not None]
        return Group(ticket=ticket, rollouts=alive, places=len(requests), failed=failed)

    def _judge(self, group: Group) -> None:
        for rollout in (*group.failed, *group.rollouts):
            if rollout.error is None:
                self._breaker.success()
            elif not rollout.dropped:
                self._breaker.failure(rollout.error)
        self._course.algorithm.assign(group)


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

    await together([generator(), consumer()])
    await trainer.flush()


async def synchronous_training_loop(arena: Arena, trainer: SelfPlayTrainer, num_steps: int) -> None:
    """Generate, then train, then again."""
    stage = Stage(arena, trainer)
    await trainer.publish_weights()
    for _ in range(num_steps):
        await trainer.train_step(await stage.step())
