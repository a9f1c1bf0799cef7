"""Runs self-play: generates batches of an arena and trains on them, at once or in turns.

Every `eval_every` optimizer steps the arena's evaluation batch is played, every `checkpoint_every` a checkpoint is
written. A checkpoint holds the trainer's state, and the arena and its credit as they were after the last trained batch:
what was drawn later and not trained is drawn again.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.observe.monitor import Monitor
from paceline.observe.monitor.base import RunOutcome, RunPlan
from paceline.observe.monitor.directory import append_jsonl, drop_torn_line, filter_jsonl
from paceline.observe.monitor.exporters import exporter
from paceline.orchestrator.checkpoint import CheckpointError, Checkpoints
from paceline.runtime.selfplay.client import TrainingBatch
from paceline.runtime.selfplay.trainer import SelfPlayTrainer
from paceline.selfplay import Arena
from paceline.trainer import StepReport
from paceline.util.deadlines import gather_or_cancel

log = logging.getLogger("paceline.selfplay")
KEPT_CHECKPOINTS = 2


async def training_loop(
    arena: Arena,
    trainer: SelfPlayTrainer,
    num_steps: int,
    episode_concurrency: int = 8,
    batch_queue: "asyncio.Queue[TrainingBatch] | None" = None,
    *,
    resume: str = "",
    metrics_file: str | Path | None = None,
) -> None:
    """Generate and train `num_steps` batches at the same time. When the queue is full, generation waits.

    `resume` is `"latest"` or a checkpoint: the loop goes on after the batches that it has trained. Each optimizer step
    adds a line to `trainer.metrics`, and to `metrics_file` as JSON.
    """
    queue = batch_queue or asyncio.Queue(maxsize=1)
    async with LoopProgress(arena, trainer, num_steps, metrics_file, resume) as progress:
        left = range(progress.batches, num_steps)

        async def generator() -> None:
            for _ in left:
                batch = await arena.step(concurrency=episode_concurrency)
                await queue.put(batch)  # unbounded: it is the trainer's turn, and its failure cancels this

        async def consumer() -> None:
            for _ in left:
                batch = await queue.get()  # unbounded: it is the sampler's turn, and its failure cancels this
                await progress.record(batch, await trainer.accumulate(batch.records))

        await gather_or_cancel([generator(), consumer()])
        await progress.record(None, await trainer.flush())


async def synchronous_training_loop(
    arena: Arena,
    trainer: SelfPlayTrainer,
    num_steps: int,
    *,
    resume: str = "",
    metrics_file: str | Path | None = None,
) -> None:
    """Generate, then train, then again; `resume` and `metrics_file` as in `training_loop`."""
    async with LoopProgress(arena, trainer, num_steps, metrics_file, resume) as progress:
        for _ in range(progress.batches, num_steps):
            batch = await arena.step()
            await progress.record(batch, await trainer.train_step(batch))


class LoopProgress:
    """Counts the batches of a loop; records metrics, evaluates and writes checkpoints after its optimizer steps."""

    def __init__(
        self,
        arena: Arena,
        trainer: SelfPlayTrainer,
        num_steps: int,
        metrics_file: str | Path | None = None,
        resume: str = "",
    ) -> None:
        self._arena, self._trainer, self._total = arena, trainer, num_steps
        if arena.client is None:
            arena.client = trainer.client
        self._config = trainer.config
        self._folder = Path(trainer.config.checkpoint_dir)
        self._checkpoints = Checkpoints(self._folder, KEPT_CHECKPOINTS)
        self._metrics_file = None if metrics_file is None else Path(metrics_file)
        self._resume = resume
        self._rewards: dict[str, list[float]] = {}
        """Of each actor, the mean of each batch since the last optimizer step."""
        self._monitor = Monitor()
        self.batches = 0
        """Batches trained so far."""

    async def __aenter__(self) -> "LoopProgress":
        self._runner = self._trainer.client.runner(self._arena)
        if self._resume:
            await self._restore()
        start = self._trainer.version
        found = self._checkpoints.all()
        if self._config.checkpoint_every and found and found[-1].name > f"step-{start:06d}":
            raise CheckpointError(
                f"checkpoint_dir `{self._folder}` holds checkpoints of another training, up to {found[-1].name}: go on "
                'from them with resume="latest", or give another checkpoint_dir'
            )
        if self._metrics_file is not None:
            self._metrics_file.parent.mkdir(parents=True, exist_ok=True)
            drop_torn_line(self._metrics_file)
            filter_jsonl(self._metrics_file, lambda line: line.get("step", 0) <= start)
        self._monitor = self._wandb(start)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        done = self.batches >= self._total
        if done and error is None and not self._trainer.version:
            log.warning(
                "%d batches and no optimizer step: in every group all rewards were equal, or all samples were left out",
                self.batches,
            )
        status = "finished" if error is None else "failed"
        self._monitor.end(RunOutcome(status, self._trainer.version, "" if error is None else str(error)))

    async def record(self, batch: TrainingBatch | None, report: StepReport | None) -> None:
        """A batch was given to the trainer, or the last samples were flushed; `report` is of the step it made."""
        if batch is not None:
            self.batches += 1
            for actor, reward in batch.rewards().items():
                self._rewards.setdefault(actor, []).append(reward)
        if report is None:
            return
        step, trainer = self._trainer.version, self._trainer
        line: dict[str, Any] = {"step": step, **report.metrics}
        line |= {f"reward/{actor}": sum(means) / len(means) for actor, means in self._rewards.items()}
        line |= {"stale_samples": trainer.stale, "clip_skipped_samples": trainer.skipped}
        self._rewards = {}
        if report.trouble:
            log.warning("step %d: %s", step, report.trouble)
        if batch is not None and batch.snapshot is not None and _is_due(step, self._config.checkpoint_every):
            state = {"batches": self.batches, "stale": trainer.stale, "skipped": trainer.skipped}
            written = _as_json(state | batch.snapshot.state())
            await self._checkpoints.save(step, written, trainer.save)
        if _is_due(step, self._config.eval_every):
            line |= await self._runner.evaluate(self._config.eval_concurrency)
        trainer.metrics.append(line)
        if self._metrics_file is not None:
            append_jsonl(self._metrics_file, [line])
        self._monitor.step(step, {name: value for name, value in line.items() if name != "step"})

    async def _restore(self) -> None:
        path, state = self._checkpoints.find(self._resume)
        await self._checkpoints.check(path)
        if not {"batches", "arena", "credit", "draws"} <= state.keys():
            raise CheckpointError(
                f"{path} is not a checkpoint of training_loop: give one of these, or go on from a run's checkpoint "
                "with `paceline train --resume`"
            )
        await self._trainer.load(path)
        self._runner.load(state)
        self.batches = state["batches"]
        self._trainer.stale, self._trainer.skipped = state["stale"], state["skipped"]
        self._checkpoints.delete_after(self._trainer.version)
        self._trainer.metrics[:] = [line for line in self._trainer.metrics if line["step"] <= self._trainer.version]

    def _wandb(self, start: int) -> Monitor:
        """The exporter to Weights & Biases, begun; one that does nothing where none is asked for or none is there."""
        if self._config.wandb_project is None:
            return Monitor()
        try:
            monitor = exporter("wandb", self._config.wandb_project)
        except PacelineError as error:
            log.warning("%s; the loop goes on without it", error)
            return Monitor()
        self._folder.mkdir(parents=True, exist_ok=True)
        if not start:
            (self._folder / "wandb-id").unlink(missing_ok=True)  # of an earlier training, whose curves are its own
        name = self._config.wandb_run_name or type(self._arena).__name__
        settings = self._config.model_dump()
        plan = RunPlan(name, self._folder, None, start, settings, ("arena",), "", 0)
        monitor.begin(plan)
        return monitor


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _as_json(state: Mapping[str, Any]) -> str:
    try:
        return json.dumps(state)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the arena's state cannot be kept in a checkpoint ({error}): let artifacts and the meta of requests be "
            "JSON, or set checkpoint_every = 0"
        ) from error
