"""Runs self-play: generates batches of an arena and trains on them, at once or in turns.

Every `eval_every` optimizer steps the arena's evaluation batch is played, every `checkpoint_every` a checkpoint is
written, and one more where the loop ends, however it does. A checkpoint holds the trainer's state, and the arena and
its credit as they were after the last trained batch: what was drawn later and not trained is drawn again.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.observe.monitor import Monitor
from paceline.observe.monitor.base import RunOutcome, RunPlan
from paceline.observe.monitor.directory import append_jsonl, drop_torn_line, filter_jsonl
from paceline.observe.monitor.exporters import exporter
from paceline.orchestrator.checkpoint import LATEST, CheckpointError, Checkpoints
from paceline.runtime.selfplay.client import ArenaSnapshot, TrainingBatch
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
                progress.begin(batch)
                await progress.record(await trainer.accumulate(batch.records))

        await gather_or_cancel([generator(), consumer()])
        await progress.record(await trainer.flush())


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
            progress.begin(batch)
            await progress.record(await trainer.train_step(batch))


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
        _check_arguments(arena, trainer, num_steps)
        self._arena, self._trainer, self._total = arena, trainer, num_steps
        if arena.client is None:
            arena.client = trainer.client
        self._config = trainer.config
        self._folder = Path(trainer.config.checkpoint_dir)
        self._checkpoints = Checkpoints(self._folder, KEPT_CHECKPOINTS, 'resume="{}"')
        self._metrics_file = None if metrics_file is None else Path(metrics_file)
        self._resume = str(resume)
        self._rewards: dict[str, list[float]] = {}
        """Of each actor, the mean of each batch since the last optimizer step."""
        self._failed = 0
        """Rollouts that failed."""
        self._batch: TrainingBatch | None = None
        """The last batch that the trainer was given."""
        self._version = trainer.version
        """Of the last optimizer step that was recorded."""
        self._unsaved: tuple[dict[str, int], ArenaSnapshot] | None = None
        """The loop's and the arena's state after that step, for a checkpoint; None once it is written."""
        self._monitor = Monitor()
        self.batches = 0
        """Batches given to the trainer so far."""

    async def __aenter__(self) -> "LoopProgress":
        self._runner = self._trainer.client.runner(self._arena)
        if self._resume:
            await self._restore()
        self._version = start = self._trainer.version
        found = self._checkpoints.all()
        if self._config.checkpoint_every and found and found[-1].name > f"step-{start:06d}":
            self._set_aside(found)
        self._prepare_files(start)
        self._monitor = self._wandb(start)
        return self

    def _set_aside(self, found: Sequence[Path]) -> None:
        """Make room for a new training's checkpoints where there are those of another."""
        names = (self._folder / f"earlier-{number}" for number in count(1))
        aside = next(name for name in names if not name.exists())
        aside.mkdir()
        for checkpoint in found:
            checkpoint.rename(aside / checkpoint.name)
        (self._folder / LATEST).unlink(missing_ok=True)
        log.warning(
            "the checkpoints of another training, up to %s, are in `%s` now: to go on from them, give "
            'resume="latest" and that folder as checkpoint_dir',
            *(found[-1].name, aside),
        )

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._trainer.version > self._version:  # cancelled after its step, before the caller heard of it
            self._write(self._line_of(self._trainer.reports[-1]))
        then = (
            'go on with resume="latest"' if self._config.checkpoint_every else "checkpoint_every = 0 kept nothing of it"
        )
        try:
            await self._save()
        except PacelineError as unwritten:
            log.warning("no checkpoint of step %d: %s", self._version, unwritten)
        if error is not None and self._version:
            log.warning("stopped after step %d, in batch %d of %d: %s", self._version, self.batches, self._total, then)
        elif error is None and self.batches and not self._version:
            log.warning(
                "%d batches and no optimizer step: in every group all rewards were equal (get_batch lists each request "
                "several times), or all samples were left out; %d rollouts failed",
                self.batches,
                self._failed,
            )
        status = "finished" if error is None else "interrupted" if _is_stop(error) else "failed"
        self._monitor.end(RunOutcome(status, self._version, "" if error is None else str(error)))

    def begin(self, batch: TrainingBatch) -> None:
        """The trainer gets this batch next."""
        self._batch = batch
        self.batches += 1
        self._failed += sum(len(group.failed) for group in batch.groups)
        for actor, reward in batch.rewards().items():
            self._rewards.setdefault(actor, []).append(reward)

    async def record(self, report: StepReport | None) -> None:
        """The batch was trained, or the last samples were flushed; `report` is of the step it made."""
        if report is None:
            return
        line = self._line_of(report)
        try:
            if _is_due(self._version, self._config.checkpoint_every):
                await self._save()
            if _is_due(self._version, self._config.eval_every):
                line |= await self._runner.evaluate(self._config.eval_concurrency)
        finally:
            self._write(line)

    def _line_of(self, report: StepReport) -> dict[str, Any]:
        """Metrics of the step just taken. The loop's state after it is kept for a checkpoint."""
        trainer = self._trainer
        self._version = trainer.version
        if self._batch is not None and self._batch.snapshot is not None:
            counts = {"batches": self.batches, "stale": trainer.stale, "skipped": trainer.skipped}
            self._unsaved = counts, self._batch.snapshot
        if report.trouble:
            log.warning("step %d: %s", self._version, report.trouble)
        line: dict[str, Any] = {"step": self._version, **report.metrics}
        line |= {f"reward/{actor}": sum(means) / len(means) for actor, means in self._rewards.items()}
        self._rewards = {}
        return line | {"stale_samples": trainer.stale, "clip_skipped_samples": trainer.skipped}

    def _write(self, line: dict[str, Any]) -> None:
        self._trainer.metrics.append(line)
        if self._metrics_file is not None:
            append_jsonl(self._metrics_file, [line])
        self._monitor.step(line["step"], {name: value for name, value in line.items() if name != "step"})

    async def _save(self) -> None:
        """Write a checkpoint of the last step, unless it is there."""
        if self._unsaved is not None and self._config.checkpoint_every:
            (counts, snapshot), self._unsaved = self._unsaved, None
            await self._checkpoints.save(self._version, _as_json(counts | snapshot.state()), self._trainer.save)

    def _prepare_files(self, start: int) -> None:
        """Make the folders, and take back metrics of steps after the one that the loop goes on from."""
        file = self._metrics_file
        try:
            if self._config.checkpoint_every:
                self._folder.mkdir(parents=True, exist_ok=True)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                drop_torn_line(file)
                filter_jsonl(file, lambda line: line.get("step", 0) <= start)
        except OSError as error:
            raise PacelineError(
                f"checkpoint_dir `{self._folder}` or metrics_file `{file}` cannot be written "
                f"({error.filename}: {error.strerror}): give a folder for the one, and a file for the other"
            ) from error

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


def _check_arguments(arena: object, trainer: object, num_steps: object) -> None:
    wrong = ""
    if not isinstance(arena, Arena):
        wrong = f"arena: got a {type(arena).__name__}: give an object of your class of Arena"
    elif not isinstance(trainer, SelfPlayTrainer):
        wrong = f"trainer: got a {type(trainer).__name__}: give Trainer(model, optimizer, config, client)"
    elif not hasattr(arena, "client"):
        wrong = (
            f"{type(arena).__name__}.__init__ calls no super().__init__(client, credit_assigner): let it do so first"
        )
    elif not isinstance(num_steps, int) or num_steps < 0:
        wrong = f"num_steps = {num_steps!r}: give the number of batches to train on"
    if wrong:
        raise PacelineError(wrong)


def _is_stop(error: BaseException) -> bool:
    return isinstance(error, asyncio.CancelledError | KeyboardInterrupt)


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
