"""One run from its config to its last line: directory, monitors, parts, conductor, export."""

import asyncio
import contextlib
import errno
import signal
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from paceline.cluster.garbage import rarely_collected
from paceline.cluster.league import standings
from paceline.cluster.local import Local, local
from paceline.config import RunConfig, dump
from paceline.envs import Environment
from paceline.errors import PacelineError
from paceline.monitor import (
    Monitor,
    Monitors,
    Recorder,
    RunDirectory,
    RunOutcome,
    RunPlan,
    choose,
    exporter,
    plot_rewards,
    read_jsonl,
    summary,
)
from paceline.orchestrator import Checkpoints, Conductor, Parts, RealClock, opened
from paceline.rollout import Voice


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run left behind."""

    outcome: RunOutcome
    directory: Path
    metrics: list[dict[str, Any]]
    """One entry per step, as in `metrics.jsonl`."""
    summary: list[str]
    error: Exception | None = None


def train(
    config: RunConfig,
    *,
    environments: dict[str, Environment] | None = None,
    overwrite: bool = False,
    screen: TextIO | None = None,
) -> RunResult:
    """Run to the end and answer with what happened. Errors that are not the user's to mend are raised.

    `environments` replaces environments of the run file by objects, by name. `screen` is where progress is shown.
    """
    path = Path(config.runs) / config.name
    with ExitStack() as stack:
        directory = stack.enter_context(RunDirectory.claim(path, bool(config.resume), overwrite))
        shown = [choose(screen)] if screen is not None else []
        exporters = [exporter(kind, config.record.project) for kind in config.record.exporters]
        monitor = stack.enter_context(Monitors(Recorder(path, keep_batches=config.record.batches), *shown, *exporters))
        error: Exception | None = None
        try:
            with rarely_collected():
                outcome = asyncio.run(_train(config, directory, monitor, environments))
        except PacelineError as failure:
            outcome, error = _failed(directory, config, failure), failure
        except OSError as failure:
            if failure.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            error = PacelineError(f"{path} cannot be written ({failure.strerror}): make room, then add --resume latest")
            outcome = _failed(directory, config, error)
        # Before the run began, whatever lies in the directory is an older run's.
        metrics = read_jsonl(directory.metrics_file) if directory.begun else []
        if outcome.status != "failed" and any(line["step"] for line in metrics):
            plot_rewards(metrics, directory.plot, config.name)
        with contextlib.suppress(OSError):  # a disk that is full stays full, and the outcome already says so
            monitor.end(outcome)
        lines = summary(metrics, outcome, path)
        with contextlib.suppress(OSError):
            lines = [*lines, *(standings(path) if outcome.checkpoint else [])]
        return RunResult(outcome, path, metrics, lines, error)


async def _train(
    config: RunConfig, directory: RunDirectory, monitor: Monitor, environments: dict[str, Environment] | None
) -> RunOutcome:
    with local(config, directory.root / "dumps", monitor.phase, environments) as parts:
        voice = parts.voice(config.sampling)
        async with opened(parts.courses, voice):
            return await _conduct(config, directory, monitor, parts, voice)


async def _conduct(
    config: RunConfig, directory: RunDirectory, monitor: Monitor, parts: Local, voice: Voice
) -> RunOutcome:
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep)
    conductor = Conductor(
        config,
        Parts(
            pool=parts.pool,
            trainer=parts.trainer,
            voice=voice,
            eval_voice=parts.voice(config.eval.sampling or config.sampling),
            courses=parts.courses,
            monitor=monitor,
            checkpoints=checkpoints,
            clock=RealClock(),
            past=parts.past,
        ),
    )
    await conductor.restore()  # a checkpoint that cannot be taken up leaves the run directory as it is
    directory.begin(dump(config))
    monitor.begin(_plan(config, directory.root, parts, conductor.step))
    with _stop_on_signals(conductor, monitor) as stopped:
        await conductor.run()
    if stopped:
        message = "stopped by the user"
        return RunOutcome("interrupted", conductor.step, message, conductor.checkpoint)
    monitor.phase("exporting the model")
    await parts.trainer.export(directory.export, parts.tokenizer)
    return RunOutcome("finished", conductor.step, "", conductor.checkpoint, directory.export)


def _plan(config: RunConfig, root: Path, parts: Local, start: int) -> RunPlan:
    return RunPlan(
        name=config.name,
        directory=root,
        total_steps=config.steps,
        start_step=start,
        config=config.model_dump(mode="json", exclude_none=True),
        envs=tuple(parts.courses),
        device=parts.device,
        parameters=parts.parameters,
    )


@contextmanager
def _stop_on_signals(conductor: Conductor, monitor: Monitor) -> Generator[list[int]]:
    """The first Ctrl-C ends the run after the step under way; a second one ends it at once."""
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        if len(received) > 1:
            loop.remove_signal_handler(number)
            signal.raise_signal(number)
        monitor.note("stopping after this step, with a checkpoint; press Ctrl-C again to stop at once")
        conductor.stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        for number in numbers:
            loop.add_signal_handler(number, stop, number)
    except (ValueError, RuntimeError, NotImplementedError):
        # Signals belong to the main thread; a run inside another thread is stopped by whoever started it.
        yield received
        return
    try:
        yield received
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _failed(directory: RunDirectory, config: RunConfig, error: PacelineError) -> RunOutcome:
    if not directory.begun:
        return RunOutcome("failed", 0, str(error))
    saved = next(reversed(Checkpoints(directory.checkpoints, config.checkpoint.keep).all()), None)
    metrics = read_jsonl(directory.metrics_file)
    return RunOutcome("failed", metrics[-1]["step"] if metrics else 0, str(error), saved)
