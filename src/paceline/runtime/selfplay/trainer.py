"""Accumulates gradients of samples, steps when there are enough, and publishes each version to the client's engines."""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from transformers import PreTrainedTokenizerBase

from paceline.config import trainer as sections
from paceline.config.model import ModelConfig
from paceline.data import Sample
from paceline.errors import PacelineError
from paceline.model import load_tokenizer
from paceline.orchestrator.gate import limit_staleness
from paceline.runtime.local import trainer_of
from paceline.runtime.selfplay.client import Client, OpenAIClient, TrainingBatch
from paceline.runtime.selfplay.settings import SelfPlayTrainerConfig, check_trains
from paceline.trainer import StepReport
from paceline.trainer.trainer import LocalTrainer

log = logging.getLogger("paceline.selfplay")
StepTask = asyncio.Task[StepReport | None]
T = TypeVar("T")


class SelfPlayTrainer:
    """Takes samples, steps when there are enough, and publishes each new version to its client.

    `accumulate` and `train_step` begin at once and return the task that does the work: await it for its report, or go
    on without. Work is done in the order of the calls. `Arena.step` waits for a `train_step`, and for all but the last
    `accumulate`, and raises what failed in them; `flush` waits for everything.
    """

    def __init__(
        self,
        model: Any,
        optimizer: sections.OptimizerConfig | None = None,
        config: SelfPlayTrainerConfig | None = None,
        client: Client | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.config = config = _checked_config(config)
        self.client = client = _checked_client(client, config)
        check_trains(model)
        vocabulary = model.config.get_text_config().vocab_size
        if config.pad_token_id >= vocabulary:
            raise PacelineError(
                f"pad_token_id = {config.pad_token_id} is no token of this model, which has {vocabulary}: leave it "
                "out, since samples are packed without padding"
            )
        self.stale = 0
        """Samples left out because they were too old."""
        self.skipped = 0
        """Samples left out by `clip_skip_threshold`, with their micro-batch."""
        self.reports: list[StepReport] = []
        self.metrics: list[dict[str, Any]] = []
        """A line for each optimizer step of a loop: the step, its losses, mean rewards, evaluations."""
        self.tokenizer = tokenizer or load_tokenizer(ModelConfig(name=str(model.name_or_path)))
        self._trainer = cast(LocalTrainer, trainer_of(model, config.section(_optimizer(optimizer, config))))
        self._accumulated: list[Sample] = []
        """Samples whose gradients wait for the step."""
        self._count = 0
        """Of these, the ones that were not left out."""
        self._work: deque[StepTask] = deque()
        self._ahead = 0
        self._is_published = False
        client.connect(model, self.tokenizer, self._before_play)

    @property
    def version(self) -> int:
        """Optimizer steps taken: the policy's version."""
        return self._trainer.version

    def accumulate(self, records: Sequence[Sample]) -> StepTask:
        """Add the gradients of fresh samples; once `min_samples_per_step` of them count, step and publish.

        The task's result is the step's report, or None without a step.
        """
        return self._begin(self._accumulate(_check_records(records), self.config.min_samples_per_step), ahead=1)

    def train_step(self, batch: TrainingBatch) -> StepTask:
        """Exactly one step on this batch and whatever waits; None if nothing in it counts."""
        if not isinstance(batch, TrainingBatch):
            raise PacelineError(f"train_step got a {type(batch).__name__}: give a batch, as `arena.step` returns it")
        return self._begin(self._accumulate(_check_records(batch.records), 1), ahead=0)

    async def flush(self) -> StepReport | None:
        """Finish what was begun, and train what is left over, however little it is."""
        await self._finish(0)
        return await self.train_step(TrainingBatch([]))

    async def publish_weights(self) -> None:
        """Publish the current version to the client's engines."""
        await self.client.pool.load_weights(await self._trainer.weights())
        self._is_published = True

    async def save(self, folder: Path) -> None:
        """Write the trainer's part of a checkpoint: adapters, optimizer, random numbers, version. What has failed
        in work that was not awaited is raised by `flush` and the next batch, not here."""
        if running := [task for task in self._work if not task.done()]:
            await asyncio.wait(running)  # bounded: as each piece of work is
        await self._trainer.save(folder)

    async def load(self, folder: Path) -> None:
        """Go on from a checkpoint; the next batch is played with its weights."""
        await self._finish(0)
        await self._trainer.load(folder)
        self._accumulated, self._count, self._is_published = [], 0, False

    async def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with the tokenizer, adapters merged."""
        await self._finish(0)
        await self._trainer.export(folder, self.tokenizer)

    def close(self) -> None:
        self._trainer.close()

    # -- work in order ----------------------------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, StepReport | None], ahead: int) -> StepTask:
        before = self._work[-1] if self._work else None

        async def in_order() -> StepReport | None:
            if before is not None and not before.done():
                await asyncio.wait([before])  # bounded: as each piece of work is
            return await work  # bounded: the trainer computes, and publishing has its own deadline

        try:
            task = asyncio.get_running_loop().create_task(in_order())
        except RuntimeError:
            work.close()
            raise PacelineError(
                "accumulate and train_step need a running event loop: call them in an async function, as the loops do"
            ) from None
        task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it began
        while self._work and self._work[0].done() and _error_of(self._work[0]) is None:
            self._work.popleft()
        self._work.append(task)
        self._ahead = ahead
        return task

    async def _finish(self, most: int) -> None:
        """Wait until no more than so many pieces of work are under way, and raise what one of them raised."""
        while len(self._work) > most or (self._work and self._work[0].done()):
            first = self._work[0]
            if not first.done():
                await asyncio.wait([first])  # bounded: as each piece of work is
                continue
            self._work.popleft()
            if (error := _error_of(first)) is not None:
                raise error

    async def _before_play(self) -> None:
        await self._finish(self._ahead)
        if not self._is_published:
            await self.client.check()
            await self.publish_weights()

    async def _accumulate(self, records: Sequence[Sample], needed: int) -> StepReport | None:
        aged = [limit_staleness(sample, self.version, self.config.staleness_limit, "drop") for sample in records]
        fresh = [sample for sample in aged if sample is not None]
        self.stale += len(aged) - len(fresh)
        if fresh:
            before, self._count = self._count, await _run_to_end(self._trainer.accumulate(fresh))
            self.skipped += before + len(fresh) - self._count
            self._accumulated += fresh
        if self._count < needed:
            return None
        batch, self._accumulated, self._count = self._accumulated, [], 0
        report = await _run_to_end(self._trainer.step(batch))
        self.reports.append(report)
        try:
            await self.publish_weights()
        except BaseException:
            self._is_published = False  # the next batch publishes it before it is played
            raise
        return report


async def _run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of the trainer's work. Cancelled in the middle, it ends as ever, and the caller's next wait is
    cancelled: samples are counted where their gradients are, and a step that was taken is known."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)  # bounded: the trainer computes
    except asyncio.CancelledError:
        if task.cancelled():
            raise
        result = await task  # bounded: the trainer computes
        cast(asyncio.Task, asyncio.current_task()).cancel()
        return result


def _error_of(task: StepTask) -> BaseException | None:
    return None if task.cancelled() else task.exception()


def _optimizer(given: sections.OptimizerConfig | None, config: SelfPlayTrainerConfig) -> sections.OptimizerConfig:
    """The optimizer that was given, with its own learning rate; without one, Adam with the config's."""
    if given is None:
        return sections.OptimizerConfig(lr=config.lr)
    if not isinstance(given, sections.OptimizerConfig):
        what = f"{type(given).__module__}.{type(given).__qualname__}"
        raise PacelineError(f"optimizer: a {what} is not one of this library: give optim.Adam(learning_rate=...)")
    if "lr" in config.model_fields_set and config.lr != given.lr:
        log.warning("lr = %g is not used: the optimizer that was given has %g", config.lr, given.lr)
    return given


def _checked_config(config: SelfPlayTrainerConfig | None) -> SelfPlayTrainerConfig:
    """A copy, checked anew: its fields may have been assigned to."""
    if config is not None and not isinstance(config, SelfPlayTrainerConfig):
        raise PacelineError(f"config: got a {type(config).__name__}: give TrainerConfig(...)")
    return SelfPlayTrainerConfig(**({} if config is None else config.model_dump(exclude_unset=True, warnings=False)))


def _checked_client(client: Client | None, config: SelfPlayTrainerConfig) -> Client:
    """The client that was given, if it speaks to the server of `inference_url`; else a client of that server."""
    own = OpenAIClient(config.inference_url)
    if client is None:
        return own
    if not isinstance(client, Client):
        raise PacelineError(f"client: got a {type(client).__name__}: give OpenAIClient(base_url=...)")
    if isinstance(client, OpenAIClient) and "inference_url" in config.model_fields_set and client.url != own.url:
        raise PacelineError(
            f"inference_url = `{own.url}`, but the client speaks to {client.url}, and weights are published to the "
            "server that is sampled from: give both the same address, or leave inference_url out"
        )
    return client


def _check_records(records: Sequence[Sample]) -> list[Sample]:
    if not isinstance(records, Sequence):
        raise PacelineError(f"accumulate got a {type(records).__name__}: give the records of a batch, `batch.records`")
    for record in records:
        if not isinstance(record, Sample):
            raise PacelineError(f"{record!r} is no record: give those of a batch, as in `batch.records`")
    return list(records)
