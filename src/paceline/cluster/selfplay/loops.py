"""Generation and training, at the same time or in turn."""

import asyncio

from paceline.arena import Arena
from paceline.arena.together import together
from paceline.cluster.selfplay.stage import Stage
from paceline.cluster.selfplay.trainer import Trainer, TrainingBatch


async def training_loop(
    arena: Arena,
    trainer: Trainer,
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


async def synchronous_training_loop(arena: Arena, trainer: Trainer, num_steps: int) -> None:
    """Generate, then train, then again."""
    stage = Stage(arena, trainer)
    await trainer.publish_weights()
    for _ in range(num_steps):
        await trainer.train_step(await stage.step())
