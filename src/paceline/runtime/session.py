"""Leads a run from its config to its end: directory, monitors, parts, orchestrator, export."""

import asyncio
import contextlib
import errno
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TextIO

from paceline.config import RunConfig
from paceline.config.load import dump_with_absolute_paths
from paceline.envs import Environment
from paceline.errors import PacelineError
from paceline.observe.monitor import (
    Monitor,
    Monitors,
    RunDirectory,
    RunOutcome,
    RunPlan,
    RunRecorder,
    choose,
    exporter,
    plot_rewards,
    read_sound,
    summary,
    watching,
)
from paceline.observe.monitor.text import show_as_written, shown
from paceline.observe.record import RolloutRecorder
from paceline.observe.record.advice import AdviceMemory
from paceline.orchestrator import (
    CheckpointError,
    Checkpoints,
    DamagedCheckpoint,
    Orchestrator,
    OrchestratorParts,
    RealClock,
    RollBack,
    RunStopped,
    opened,
)
from paceline.planner import keep_plan
from paceline.rollout import SamplingClient
from paceline.runtime.colocated.rank_info import refuse_torchrun
from paceline.runtime.forced_end import ForcedEnd
from paceline.runtime.league import standings
from paceline.runtime.local import Placed, local
from paceline.runtime.model_backends import with_settled_dtype
from paceline.runtime.policy import RunResult
from paceline.runtime.preflight import NEEDS_RAY, refuse_unready
from paceline.runtime.signals import USER, Signals, run_to_the_end
from paceline.trainer import TrainerLost
from paceline.util.gc_tuning import rarely_collected
from paceline.util.user_code import UserCodeError, failure_traces, unexpected

MOST_RETURNS = 8
"""Times in a row that a run may go back to the same checkpoint."""

Given = dict[str, Environment] | None
Placement = Callable[[RunConfig, Path, Callable[[str], None], Given], AbstractAsyncContextManager[Placed]]
"""Builds the parts of a run, and takes them down again."""


def train(
    config: RunConfig,
    *,
    environments: dict[str, Environment] | None = None,
    overwrite: bool = False,
    screen: TextIO | Monitor | None = None,
    signals: Signals | None = None,
) -> RunResult:
    """Run to the end and answer with what happened.

    `environments` replaces environments of the run file by objects, by name. `screen` is where progress is shown.
    `signals` lets another thread stop the run; `paceline.train` is the function for users.
    """
    refuse_unready(config, environments or ())
    config = with_settled_dtype(config)
    if config.placement != "colocated":
        refuse_torchrun(config)
    _refuse_fewer_steps(config)
    if config.placement == "colocated":
        from paceline.runtime.colocated.place import colocated

        return colocated(config, environments, overwrite, screen, signals)
    if config.placement in ("local", "ray"):
        place = here if config.placement == "local" else _ray()
        return run_session(config, place, environments, overwrite, screen, signals)
    if environments:
        raise PacelineError(
            f"environments {sorted(environments)} were given as objects, which cannot go to another process: name them "
            'in the run file, or set placement = "local"'
        )
    from paceline.runtime.processes.supervisor import supervised

    return supervised(config, overwrite, screen, signals)


def _refuse_fewer_steps(config: RunConfig) -> None:
    """Say at once that `steps` counts from the run's beginning, instead of a run that ends before it starts."""
    if config.resume is None or config.steps is None:
        return
    checkpoints = Checkpoints(RunDirectory(Path(config.runs) / config.name).checkpoints, 1)
    try:
        path, state = checkpoints.find(config.resume)
    except CheckpointError:
        return  # said when the run is restored
    if state["step"] > config.steps:
        raise PacelineError(
            f"the run is already at step {state['step']} ({path.name}), and steps = {config.steps} is the total since "
            f"its beginning: write --steps {state['step'] + config.steps} to train {config.steps} more, or --resume "
            f"with an earlier checkpoint; {checkpoints.offer()}"
        )


def _ray() -> Placement:
    try:
        from paceline.runtime.ray.place import on_ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise PacelineError(NEEDS_RAY) from None
    return on_ray


@asynccontextmanager
async def here(config: RunConfig, dumps: Path, phase: Callable[[str], None], given: Given) -> AsyncGenerator[Placed]:
    """Everything in this process."""
    with local(config, dumps, phase, given) as parts:
        yield parts


@dataclass(frozen=True, slots=True)
class RunSession:
    """A run to lead: its config, its placement, and the monitors that show it."""

    config: RunConfig
    placement: Placement
    shown: Sequence[Monitor] = ()


def run_session(
    config: RunConfig,
    placement: Placement,
    environments: Given = None,
    overwrite: bool = False,
    screen: TextIO | Monitor | None = None,
    signals: Signals | None = None,
) -> RunResult:
    """Lead a run whose parts are wherever the placement puts them."""
    session = RunSession(config, placement, [choose(screen)] if screen is not None else [])
    return run_sessions([session], environments=environments, overwrite=overwrite, signals=signals)[0]


def run_sessions(
    runs: Sequence[RunSession], *, environments: Given = None, overwrite: bool = False, signals: Signals | None = None
) -> list[RunResult]:
    """Lead runs side by side in one event loop. What stops one stops all."""
    with ExitStack() as stack:
        contexts = [_RunContext.open(stack, run, overwrite) for run in runs]
        signals = signals or Signals()

        def end(status: Literal["interrupted", "failed"], message: str) -> None:
            for context in contexts:
                context.cut_short(status, message)

        def note(text: str) -> None:
            for context in contexts:
                context.monitor.note(text)

        patience = min(run.config.breaker.blocked_seconds for run in runs)
        signals.forced = ForcedEnd(end, note, patience)
        with signals.forced.watching(), rarely_collected():
            try:
                ends = run_to_the_end(_all(contexts, environments, signals))
            except (KeyboardInterrupt, asyncio.CancelledError):
                end("interrupted", f"{USER}, at once")
                raise
            return [context.end(*end) for context, end in zip(contexts, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class _RunContext:
    """The directory and monitors of one run."""

    run: RunSession
    directory: RunDirectory
    monitor: Monitors

    @classmethod
    def open(cls, stack: ExitStack, run: RunSession, overwrite: bool) -> "_RunContext":
        run = replace(run, config=run.config.model_copy(update={"runs": show_as_written(run.config.runs)}))
        config, path = run.config, Path(run.config.runs) / run.config.name
        directory = stack.enter_context(RunDirectory.claim(path, bool(config.resume), overwrite))
        exporters = [exporter(kind, config.record.project) for kind in config.record.exporters]
        keepers = [RolloutRecorder(path)] if config.record.all else []
        recorder = RunRecorder(path, keep_batches=config.record.batches)
        monitor = stack.enter_context(Monitors(recorder, *keepers, *run.shown, *exporters))
        stack.enter_context(watching(monitor, path, config.record.watchdog_seconds))
        return cls(run, directory, monitor)

    async def lead(self, environments: Given, signals: Signals) -> tuple[RunOutcome, Exception | None]:
        """To the end, or to an error: of the user's code, of the machine, or a bug. Each is the outcome of its run."""
        config, root = self.run.config, self.directory.root
        try:
            return await _train(self, environments, signals), None
        except PacelineError as failure:
            error: PacelineError = failure
        except Exception as failure:
            if isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT):
                saved = Checkpoints(self.directory.checkpoints, 1).all()
                then = "add --resume latest" if saved else "start the run again (no checkpoint was saved)"
                error = PacelineError(f"{root} cannot be written ({failure.strerror}): make room, then {then}")
            else:
                error = unexpected(failure, self.directory.events_file)
        signals.stop(f"{config.name} failed", f"{config.name} failed: {error}; stopping after this step")
        return _failed(self.directory, config, error), error

    def cut_short(self, status: Literal["interrupted", "failed"], message: str) -> None:
        """The run ends where it stands: what it kept so far is what there is."""
        ended = _failed(self.directory, self.run.config, PacelineError(message))
        with contextlib.suppress(OSError):
            self.monitor.end(replace(ended, status=status))

    def end(self, outcome: RunOutcome, error: Exception | None) -> RunResult:
        # Before the run began, whatever lies in the directory is an older run's, unless that is the one to resume.
        own = self.directory.begun or self.run.config.resume
        metrics = _metrics(self.directory) if own else []
        if outcome.status != "failed" and any(line["step"] for line in metrics):
            plot_rewards(metrics, self.directory.plot, self.run.config.name)
        with contextlib.suppress(OSError):  # a disk that is full stays full, and the outcome already says so
            self.monitor.end(outcome)
        return _result(outcome, self.directory.root, metrics, error)


async def _all(
    contexts: Sequence[_RunContext], environments: Given, signals: Signals
) -> list[tuple[RunOutcome, Exception | None]]:
    signals.attach()
    if len(contexts) == 1:
        return [await contexts[0].lead(environments, signals)]
    async with asyncio.TaskGroup() as group:  # bounded: by what the runs do
        tasks = [group.create_task(context.lead(environments, signals)) for context in contexts]
    return [task.result() for task in tasks]  # bounded: all are done


def result_of(directory: RunDirectory, outcome: RunOutcome) -> RunResult:
    """The result of a run that another process led."""
    failed = UserCodeError(outcome.message, outcome.frames, outcome.trace) if outcome.frames else None
    return _result(outcome, directory.root, _metrics(directory), failed or PacelineError(outcome.message))


def _metrics(directory: RunDirectory) -> list[dict[str, Any]]:
    """Line by line; a run is not lost for a damaged one."""
    return read_sound(directory.metrics_file, {"step": int})[0]


def _result(
    outcome: RunOutcome, path: Path, metrics: list[dict[str, Any]], error: Exception | None = None
) -> RunResult:
    lines = summary(metrics, outcome, path)
    with contextlib.suppress(OSError, PacelineError):
        lines = [*lines, *(standings(path) if outcome.checkpoint else [])]
    return RunResult(outcome, path, metrics, lines, error if outcome.status == "failed" else None)


async def _train(context: _RunContext, environments: Given, signals: Signals) -> RunOutcome:
    config, directory, monitor = context.run.config, context.directory, context.monitor
    with _warnings_as_notes(monitor):
        async with context.run.placement(config, directory.root / "dumps", monitor.phase, environments) as parts:
            voice = parts.voice(config.sampling)
            async with opened(parts.courses, voice, parts.attach):
                return await _orchestrate(config, directory, monitor, parts, voice, signals)


async def _orchestrate(
    config: RunConfig, directory: RunDirectory, monitor: Monitor, parts: Placed, voice: SamplingClient, signals: Signals
) -> RunOutcome:
    given = OrchestratorParts(
        pool=parts.pool,
        trainer=parts.trainer,
        client=voice,
        eval_client=parts.voice(config.eval.sampling or config.sampling),
        envs=parts.courses,
        monitor=monitor,
        checkpoints=Checkpoints(directory.checkpoints, config.checkpoint.keep),
        clock=RealClock(),
        past=parts.past,
        advisor=AdviceMemory,
    )
    returns = Returns()
    with signals.run(monitor) as stopping:
        while True:
            orchestrator = Orchestrator(config, given, shunned=returns.shunned)
            try:
                await orchestrator.restore()  # a checkpoint that cannot be taken up leaves the run directory as it is
                if not directory.begun:
                    directory.begin(dump_with_absolute_paths(config))
                    keep_plan(config, directory.root)
                    monitor.begin(_plan(config, directory.root, parts, orchestrator.step))
                else:
                    monitor.roll_back(orchestrator.step)
                stopping.follow(orchestrator)
                await orchestrator.run()
                if stopping.why:
                    return RunOutcome("interrupted", orchestrator.step, stopping.why, orchestrator.checkpoint)
                if orchestrator.halted:
                    return RunOutcome("interrupted", orchestrator.step, orchestrator.halted, orchestrator.checkpoint)
                monitor.phase("exporting the model")
                await parts.trainer.export(directory.export, parts.tokenizer)
                return RunOutcome(
                    "finished", orchestrator.step, orchestrator.solved, orchestrator.checkpoint, directory.export
                )
            except (RollBack, TrainerLost) as cause:
                newest = orchestrator.checkpoint if directory.begun else None
                if directory.begun and newest is None:
                    raise
                config = returns.back(config, newest, cause, monitor)


@dataclass(slots=True)
class Returns:
    """Counts a run's returns to a checkpoint, and keeps the draws that must not be trained again."""

    shunned: frozenset[tuple[str, int]] = frozenset()
    """Draws that broke a gradient, by environment."""
    _at: Path | None = None
    _times: int = 0
    _first: str = ""

    def back(self, config: RunConfig, newest: Path | None, cause: PacelineError, monitor: Monitor) -> RunConfig:
        """The config to go on with, from the newest checkpoint, or as the run was to begin; raises when going back once
        more would not help."""
        if newest != self._at:
            self._at, self._times, self._first = newest, 0, str(cause)
        self._times += 1
        if self._times > MOST_RETURNS:
            times = f"{MOST_RETURNS} times in a row"
            where = newest or config.resume
            raise RunStopped(f"the run went back to {where} {times}; the first cause: {self._first}")
        if isinstance(cause, RollBack):
            self.shunned |= cause.draws
        if newest is None:
            monitor.note(f"{cause}; loading {config.resume} once more")
            return config
        monitor.note(f"{cause}; going back to {newest.name}")
        return config.model_copy(update={"resume": "latest"})


def _plan(config: RunConfig, root: Path, parts: Placed, start: int) -> RunPlan:
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


class _MonitorHandler(logging.Handler):
    """Hands what parts of the run have to say on to the monitor, in the event loop's own thread."""

    def __init__(self, monitor: Monitor) -> None:
        super().__init__(logging.WARNING)
        self._monitor, self._loop = monitor, asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            self._loop.call_soon_threadsafe(self._monitor.note, record.getMessage())


@contextmanager
def _warnings_as_notes(monitor: Monitor) -> Generator[None]:
    """Warnings of Paceline's own loggers are notes of the run while it lasts."""
    handler, log = _MonitorHandler(monitor), logging.getLogger("paceline")
    before = log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = before


def _failed(directory: RunDirectory, config: RunConfig, error: PacelineError) -> RunOutcome:
    frames, trace = failure_traces(error)
    message = shown(error)
    if not directory.begun and not config.resume:
        return RunOutcome("failed", 0, message, frames=frames, trace=trace)
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep)
    saved = next(reversed(checkpoints.all()), None)
    if isinstance(error, DamagedCheckpoint):
        saved = error.whole
    elif not directory.begun and not isinstance(error, CheckpointError):
        message = f"{message}; {checkpoints.offer()}"
    metrics = _metrics(directory)
    step = metrics[-1]["step"] if metrics else 0
    return RunOutcome("failed", step, message, saved, frames=frames, trace=trace)
