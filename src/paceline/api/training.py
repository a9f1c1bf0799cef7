"""`paceline.train`: a run from Python, in a script or a notebook."""

import asyncio
import contextlib
import contextvars
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

from paceline import cluster
from paceline.api.arguments import Data, EnvironmentLike, Source, TrainingTask, resolve
from paceline.cluster.forced_end import STOP_SECONDS
from paceline.cluster.result import RunFailed, RunResult
from paceline.cluster.signals import Signals
from paceline.config import RunConfig
from paceline.envs.reward import Rewards
from paceline.monitor import Monitor, RunDirectory
from paceline.monitor.notebook import NotebookView, in_notebook

_LOOK_SECONDS = 1.0
T = TypeVar("T")


def loop_is_running() -> bool:
    """Whether this thread runs an event loop, as a notebook's does, so that it cannot run another."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_in_thread(work: Callable[[], T], signals: Signals) -> T:
    """Run `work` in a thread. The first Ctrl-C stops the run that `signals` belongs to after its step, a second one
    stops it at once, and KeyboardInterrupt is raised when it has stopped."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    # With the caller's context variables: a kernel finds the cell that output belongs to by one of them.
    context = contextvars.copy_context()
    thread = threading.Thread(target=lambda: context.run(run), name="paceline train", daemon=True)
    with _interrupts(signals.interrupt):
        thread.start()
        while not done.done():
            wait([done], _LOOK_SECONDS)
            if signals.asked_twice_since > STOP_SECONDS:  # user code blocks its event loop: the thread is left behind
                raise KeyboardInterrupt
        try:
            return done.result()  # bounded: it is done
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            thread.join()  # bounded: it has set its result


@contextmanager
def _interrupts(heard: Callable[[], None]) -> Generator[None]:
    """Call `heard` on Ctrl-C in place of what this thread does about it: `asyncio.run` cancels its task and goes on, a
    kernel raises KeyboardInterrupt in the middle of the wait."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals go to the main thread, whatever it does
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: heard())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def train(
    source: Source | None = None,
    *,
    dataset: Data | None = None,
    reward: Rewards | str | None = None,
    reward_weights: Sequence[float] | Mapping[str, float] | None = None,
    eval_dataset: Data | None = None,
    environments: Mapping[str, EnvironmentLike] | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    screen: TextIO | None = None,
    **settings: Any,
) -> RunResult:
    """Train a policy, and return what the run left behind.

        def score(completion, answer):
            return float(completion.strip() == answer)

        result = paceline.train(model="paceline:quickstart", dataset="sums.jsonl", reward=score, steps=50)

    Args:
        source: a run file, or a `RunConfig` or `Loaded`; every other argument changes it.
        dataset: rows to train on: a path or URI as in a run file, a list of dicts, or a `datasets.Dataset`.
        reward: what a completion is worth: a function, a list of functions, a dict of them by name, or an import path.
            Parameters are filled by name: `completion` with its text, all others with the row's columns.
        reward_weights: what each of several functions is multiplied by, in their order or by name; 1 when left out.
        eval_dataset: held-out rows.
        environments: in place of dataset and reward, environments by name: `Environment` objects, or functions
            `async def rollout(row, seat)` over `dataset`.
        overwrite: replace a run of the same name.
        quiet: show no progress.
        screen: where to show it; standard output, or the cell of a notebook, when left out.
        settings: keys of the run file: `model="..."`, `steps=50`, `sampling={"max_tokens": 16}`.

    Raises:
        ConfigError: a setting is wrong; the sentences are those of the command line.
        RunFailed: the run ended because of an error; its `result` is what it left behind up to there.

    Ctrl-C, or a kernel's interrupt, ends the run after the step under way with a checkpoint, and the result's
    `outcome.status` is `interrupted`; a second one stops at once with KeyboardInterrupt.
    """
    task = TrainingTask(
        dataset=dataset,
        eval_dataset=eval_dataset,
        reward=reward,
        reward_weights=reward_weights,
        environments=environments or {},
    )
    config, objects = resolve(source, task, settings)
    signals = Signals()
    shown: TextIO | Monitor | None = None if quiet else screen or (NotebookView() if in_notebook() else sys.stdout)
    work = partial(
        cluster.train, config, environments=objects or None, overwrite=overwrite, screen=shown, signals=signals
    )
    with _clean(config):
        result = run_in_thread(work, signals) if loop_is_running() else work()
        if result.outcome.status == "failed":
            raise RunFailed(result) from result.error
    return result


@contextmanager
def _clean(config: RunConfig) -> Generator[None]:
    """A call that fails before the run begins leaves no folder behind."""
    directory = RunDirectory(Path(config.runs) / config.name)
    missing = [folder for folder in (directory.root, *directory.root.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        if missing and not directory.config_file.exists():
            shutil.rmtree(directory.root, ignore_errors=True)
            for folder in missing[1:]:
                with contextlib.suppress(OSError):  # another run lies there by now
                    folder.rmdir()
        raise
