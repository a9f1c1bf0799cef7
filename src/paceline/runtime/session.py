"""Leads a run from its config to its end: directory, monitors, parts, orchestrator, export."""

import asyncio
import contextlib
import errno
import json
import logging
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

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
    choose_view,
    exporter,
    plot_rewards,
    read_valid_jsonl,
    summary,
    watch_run,
)
from paceline.observe.monitor.directory import replace_file
from paceline.observe.monitor.text import register_path, restore_paths
from paceline.observe.record import RolloutRecorder
from paceline.observe.record.advice import AdviceMemory
from paceline.orchestrator import (
    CheckpointError,
    Checkpoints,
    Clock,
    DamagedCheckpoint,
    KLReferenceModel,
    Orchestrator,
    OrchestratorParts,
    RollBack,
    RunStopped,
    open_algorithms,
    token_penalty,
)
from paceline.planner.plan import write_plan
from paceline.rollout import SamplingClient
from paceline.runtime.colocated.ranks import find_rank, refuse_torchrun, without_first_resume
from paceline.runtime.league import standings
from paceline.runtime.local import RunParts, local_placement, resumed_checkpoint, with_settled_dtype
from paceline.runtime.preflight import refuse_unready
from paceline.runtime.saved_policy import RunResult
from paceline.runtime.signals import STOPPED_BY_USER, ForcedExit, Signals, Status, run_until_complete
from paceline.trainer import TrainerLost
from paceline.util.gc_tuning import tuned_gc
from paceline.util.user_code import UserCodeError, failure_traces, restore_import_path, unexpected_failure

MAX_ROLL_BACKS = 8
"""Times in a row that a run may go back to the same checkpoint."""

Given = dict[str, Environment] | None
Placement = Callable[[RunConfig, Path, Callable[[str], None], Given], AbstractAsyncContextManager[RunParts]]
"""Builds the parts of a run, and takes them down again. Its arguments are the config, the run's folder, the
callback for phases and the environments that were given as objects."""


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
    if config.placement == "processes":
        if environments:
            raise PacelineError(
                f"environments {sorted(environments)} were given as objects, which cannot go to another process: name "
                'them in the run file, or set placement = "local"'
            )
        from paceline.runtime.processes.supervisor import Supervisor

        # Another process shows progress: a monitor of this one has nothing to show, the lines go to standard output.
        supervisor = Supervisor(config, overwrite, sys.stdout if isinstance(screen, Monitor) else screen)
        if signals is not None:
            signals.on_interrupt(supervisor.interrupt)
        return supervisor.run()
    place: Placement = local_placement
    if config.placement == "ray":
        from paceline.runtime.ray.place import ray_placement as place
    elif config.placement == "colocated":
        from paceline.runtime.colocated.place import colocated_placement, run_follower

        config, info = find_rank(config)
        if info.rank != 0:  # rank 0 leads the run and answers with all of it
            run_follower(config, info)
            return RunResult(RunOutcome("finished", 0, ""), Path(config.runs) / config.name, [], [])
        config, place = without_first_resume(config), partial(colocated_placement, info)
    return run_session(config, place, environments, overwrite, screen, signals)


def _refuse_fewer_steps(config: RunConfig) -> None:
    """Say at once that `steps` counts from the run's beginning, instead of a run that ends before it starts."""
    if config.steps is None or (resumed := resumed_checkpoint(config)) is None:
        return
    path, state = resumed
    if state["step"] > config.steps:
        offer = Checkpoints(RunDirectory(Path(config.runs) / config.name).checkpoints, 1).list_resumable()
        raise PacelineError(
            f"the run is already at step {state['step']} ({path.name}), and steps = {config.steps} is the total since "
            f"its beginning: write --steps {state['step'] + config.steps} to train {config.steps} more, or --resume "
            f"with an earlier checkpoint; {offer}"
        )


def run_session(
    config: RunConfig,
    placement: Placement,
    environments: Given = None,
    overwrite: bool = False,
    screen: TextIO | Monitor | None = None,
    signals: Signals | None = None,
) -> RunResult:
    session = RunSession(config, placement, [choose_view(screen)] if screen is not None else [])
    return run_sessions([session], environments=environments, overwrite=overwrite, signals=signals)[0]


def run_sessions(
    runs: Sequence["RunSession"], *, environments: Given = None, overwrite: bool = False, signals: Signals | None = None
) -> list[RunResult]:
    """Lead runs side by side in one event loop. What stops one stops all."""
    stops = signals or Signals()

    def end(status: Status, message: str) -> None:
        for run in runs:
            run.record_forced_end(status, message)

    def note(text: str) -> None:
        for run in runs:
            run.monitor.note(text)

    async def run_all() -> list[tuple[RunOutcome, Exception | None]]:
        stops.attach()
        if len(runs) == 1:
            return [await runs[0].run(environments, stops)]
        async with asyncio.TaskGroup() as group:  # bounded: by what the runs do
            tasks = [group.create_task(session.run(environments, stops)) for session in runs]
        return [task.result() for task in tasks]  # bounded: all are done

    with ExitStack() as stack:
        for run in runs:
            run.open(stack, overwrite)
        stops.forced = ForcedExit(end, note, min(run.config.breaker.blocked_seconds for run in runs))
        with stops.forced.watching(), tuned_gc():
            try:
                ends = run_until_complete(run_all())
            except (KeyboardInterrupt, asyncio.CancelledError):
                end("interrupted", f"{STOPPED_BY_USER}, at once")
                raise
            return [run.end(*ended) for run, ended in zip(runs, ends, strict=True)]


@dataclass(slots=True)
class RunSession:
    """A run: its config, its placement, and the monitors that show it. `open` adds its directory and all monitors."""

    config: RunConfig
    placement: Placement
    shown: Sequence[Monitor] = ()
    directory: RunDirectory = field(init=False)
    monitor: Monitors = field(init=False)

    def open(self, stack: ExitStack, overwrite: bool) -> None:
        config = self.config = self.config.model_copy(update={"runs": register_path(self.config.runs)})
        path = Path(config.runs) / config.name
        self.directory = stack.enter_context(RunDirectory.claim(path, bool(config.resume), overwrite))
        exporters = [exporter(kind, config.record.project) for kind in config.record.exporters]
        recorders = [RolloutRecorder(path)] if config.record.all else []
        recorder = RunRecorder(path, keep_batches=config.record.batches)
        self.monitor = stack.enter_context(Monitors(recorder, *recorders, *self.shown, *exporters))
        stack.enter_context(watch_run(self.monitor, path, config.record.watchdog_seconds))

    async def run(self, environments: Given, signals: Signals) -> tuple[RunOutcome, Exception | None]:
        """To the end, or to an error: of the user's code, of the machine, or a bug. Each is the outcome of its run."""
        config, root = self.config, self.directory.root
        try:
            with _warnings_as_notes(self.monitor):
                async with self.placement(config, root, self.monitor.phase, environments) as parts:
                    client = parts.make_client(config.sampling)
                    kl = config.trainer.kl
                    penalty = partial(token_penalty, kl) if kl is not None and kl.how == "reward" else None
                    async with open_algorithms(parts.envs, client, parts.attach, penalty) as attach:
                        reference = await KLReferenceModel.connect(config, client, attach, parts.reference)
                        return await self._orchestrate(parts, client, reference, signals), None
        except PacelineError as failure:
            error: PacelineError = failure
        except Exception as failure:
            if isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT):
                saved = Checkpoints(self.directory.checkpoints, 1).all()
                then = "add --resume latest" if saved else "start the run again (no checkpoint was saved)"
                error = PacelineError(f"{root} cannot be written ({failure.strerror}): make room, then {then}")
            else:
                error = unexpected_failure(failure, self.directory.events_file)
        signals.stop(f"{config.name} failed", f"{config.name} failed: {error}; stopping after this step")
        return _failed(self.directory, config, error), error

    def record_forced_end(self, status: Status, message: str) -> None:
        """The run ends where it stands: what it kept so far is what there is."""
        ended = _failed(self.directory, self.config, PacelineError(message))
        with contextlib.suppress(OSError):
            self.monitor.end(replace(ended, status=status))

    def end(self, outcome: RunOutcome, error: Exception | None) -> RunResult:
        # Before the run began, whatever lies in the directory is an older run's, unless that is the one to resume.
        own = self.directory.begun or self.config.resume
        metrics = read_metrics(self.directory) if own else []
        restore_import_path()
        if outcome.status != "failed" and any(line["step"] for line in metrics):
            try:
                plot_rewards(metrics, self.directory.plot, self.config.name)
            except Exception as failure:  # the run is over and saved
                self.monitor.note(f"there is no picture of the rewards ({type(failure).__name__}: {failure})")
        with contextlib.suppress(OSError):  # a disk that is full stays full, and the outcome already says so
            self.monitor.end(outcome)
        return _result(outcome, self.directory.root, metrics, error)

    async def _orchestrate(
        self, parts: RunParts, client: SamplingClient, reference: KLReferenceModel | None, signals: Signals
    ) -> RunOutcome:
        config, directory, monitor = self.config, self.directory, self.monitor
        given = OrchestratorParts(
            pool=parts.pool,
            trainer=parts.trainer,
            client=client,
            eval_client=parts.make_client(config.eval.sampling or config.sampling),
            envs=parts.envs,
            monitor=monitor,
            checkpoints=Checkpoints(directory.checkpoints, config.checkpoint.keep),
            clock=Clock(),
            advisor=AdviceMemory,
            reference=reference,
        )
        rollbacks = RollBackCount()
        with signals.run(monitor):
            while True:
                orchestrator = Orchestrator(config, given, skipped_draws=rollbacks.skipped_draws)
                try:
                    await orchestrator.restore()  # a checkpoint that is refused leaves the run directory as it is
                    if not directory.begun:
                        directory.begin(dump_with_absolute_paths(config))
                        write_plan(config, directory.root)
                        _write_contamination(directory, parts)
                        monitor.begin(
                            RunPlan(
                                name=config.name,
                                directory=directory.root,
                                total_steps=config.steps,
                                start_step=orchestrator.step,
                                config=config.model_dump(mode="json", exclude_none=True),
                                envs=tuple(parts.envs),
                                device=parts.device,
                                parameters=parts.parameters,
                            )
                        )
                    else:
                        monitor.roll_back(orchestrator.step)
                    signals.follow(monitor, orchestrator)
                    await orchestrator.run()
                    step, checkpoint = orchestrator.step, orchestrator.checkpoint
                    if why := signals.why or orchestrator.halt_reason:
                        return RunOutcome("interrupted", step, why, checkpoint)
                    monitor.phase("exporting the model")
                    if (promoted := orchestrator.promoted) is not None and promoted != checkpoint:
                        monitor.note(f"export/ has the weights of {promoted.name}, the last that passed [promotion]")
                        await given.checkpoints.check(promoted)
                        await parts.trainer.load(promoted)
                    await parts.trainer.export(directory.export, parts.tokenizer)
                    return RunOutcome("finished", step, orchestrator.solved_reason, checkpoint, directory.export)
                except (RollBack, TrainerLost) as cause:
                    chosen = cause.checkpoint if isinstance(cause, RollBack) else None
                    newest = (chosen or orchestrator.checkpoint) if directory.begun else None
                    if directory.begun and newest is None:
                        raise
                    config = rollbacks.config_after_rollback(config, newest, cause, monitor)


def _write_contamination(directory: RunDirectory, parts: RunParts) -> None:
    if tables := {name: env.contamination for name, env in parts.envs.items() if env.contamination}:
        text = json.dumps(tables, indent=1, ensure_ascii=False)
        replace_file(directory.contamination_file, [text.encode("utf-8", "backslashreplace")])


def result_of(directory: RunDirectory, outcome: RunOutcome) -> RunResult:
    """The result of a run that another process led."""
    failed = UserCodeError(outcome.message, outcome.frames, outcome.trace) if outcome.frames else None
    return _result(outcome, directory.root, read_metrics(directory), failed or PacelineError(outcome.message))


def read_metrics(directory: RunDirectory) -> list[dict[str, Any]]:
    """Line by line; a run is not lost for a damaged one."""
    return read_valid_jsonl(directory.metrics_file, {"step": int})[0]


def _result(
    outcome: RunOutcome, path: Path, metrics: list[dict[str, Any]], error: Exception | None = None
) -> RunResult:
    lines = summary(metrics, outcome, path)
    with contextlib.suppress(OSError, PacelineError):
        lines = [*lines, *(standings(path) if outcome.checkpoint else [])]
    return RunResult(outcome, path, metrics, lines, error if outcome.status == "failed" else None)


@dataclass(slots=True)
class RollBackCount:
    """Counts a run's returns to a checkpoint, and keeps the draws that must not be trained again."""

    skipped_draws: frozenset[tuple[str, int]] = frozenset()
    """Draws that broke a gradient, by environment."""
    _at: Path | None = None
    _times: int = 0
    _first: str = ""

    def config_after_rollback(
        self, config: RunConfig, newest: Path | None, cause: PacelineError, monitor: Monitor
    ) -> RunConfig:
        """The config that restarts the run from this checkpoint; raises after `MAX_ROLL_BACKS` times in a row."""
        if newest != self._at:
            self._at, self._times, self._first = newest, 0, str(cause)
        self._times += 1
        if self._times > MAX_ROLL_BACKS:
            where = f"{newest or config.resume} {MAX_ROLL_BACKS} times in a row"
            raise RunStopped(f"the run went back to {where}; the first cause: {self._first}")
        if isinstance(cause, RollBack):
            self.skipped_draws |= cause.draws
        if newest is None:
            monitor.note(f"{cause}; loading {config.resume} once more")
            return config
        monitor.note(f"{cause}; going back to {newest.name}")
        chosen = isinstance(cause, RollBack) and cause.checkpoint
        return config.model_copy(update={"resume": str(newest) if chosen else "latest"})


@contextmanager
def _warnings_as_notes(monitor: Monitor) -> Generator[None]:
    """Warnings of Paceline's own loggers are notes of the run while it lasts, made in the event loop's own thread."""
    loop, handler, log = asyncio.get_running_loop(), logging.Handler(logging.WARNING), logging.getLogger("paceline")

    def emit(record: logging.LogRecord) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            loop.call_soon_threadsafe(monitor.note, record.getMessage())

    handler.emit = emit
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
    message = restore_paths(error)
    if not directory.begun and not config.resume:
        return RunOutcome("failed", 0, message, frames=frames, trace=trace)
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep)
    saved = next(reversed(checkpoints.all()), None)
    if isinstance(error, DamagedCheckpoint):
        saved = error.newest_intact
    elif not directory.begun and not isinstance(error, CheckpointError):
        message = f"{message}; {checkpoints.list_resumable()}"
    metrics = read_metrics(directory)
    step = metrics[-1]["step"] if metrics else 0
    return RunOutcome("failed", step, message, saved, frames=frames, trace=trace)
