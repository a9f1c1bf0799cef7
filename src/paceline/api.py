"""Runs a training from Python, in a script or a notebook: `paceline.train`."""

import asyncio
import contextlib
import contextvars
import inspect
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path, PurePath
from typing import Any, TextIO, TypeVar

from paceline import runtime as cluster
from paceline.config import ConfigError, ConfigWarning, LoadedConfig, RunConfig, load
from paceline.config.document import PYTHON, plain_value
from paceline.config.env import CustomEnvConfig, RewardEnvConfig
from paceline.config.run import FOLDER_NAME
from paceline.data import Row
from paceline.envs import Environment, Split
from paceline.envs.custom import FunctionEnvironment
from paceline.envs.reward import RewardEnvironment, Rewards, reward_functions
from paceline.observe.monitor import Monitor, RunDirectory
from paceline.observe.monitor.plain import NotebookView, in_notebook
from paceline.runtime.saved_policy import RunFailed, RunResult
from paceline.runtime.signals import STOP_SECONDS, Signals
from paceline.util.importing import FROM_PYTHON, import_object
from paceline.util.interrupts import on_interrupt

Source = str | Path | RunConfig | LoadedConfig
"""A run file, or a config that was read or made."""
Data = str | PurePath | Sequence[Any] | Mapping[str, float]
"""Rows: a path or URI, several of them, a list of dicts, or a `datasets.Dataset`."""
EnvironmentLike = Environment | Callable[..., Any]
"""An environment object, or `async def rollout(row, seat)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTask:
    """The data, rewards and environments that `paceline.train` was given."""

    dataset: Data | None = None
    eval_dataset: Data | None = None
    reward: Rewards | str | None = None
    reward_weights: Sequence[float] | Mapping[str, float] | None = None
    environments: Mapping[str, EnvironmentLike] = field(default_factory=dict)

    @property
    def rows(self) -> dict[Split, Sequence[Row]]:
        """Those that were given as objects."""
        splits: dict[Split, Any] = {"train": self.dataset, "eval": self.eval_dataset}
        return {split: rows for split, rows in splits.items() if rows is not None and not _is_named(rows)}


def resolve(
    source: Source | None, task: TrainingTask, settings: dict[str, Any]
) -> tuple[RunConfig, dict[str, Environment]]:
    """The run's config, and the environments of it that are objects."""
    if isinstance(settings.get("model"), str | PurePath):
        settings["model"] = {"name": str(settings["model"])}
    _refuse(task, settings)
    if task.reward is not None:
        settings["env"] = [_reward_section(task, settings.get("name"))]
    elif task.environments and source is None and "env" not in settings:
        settings["env"] = [
            {"type": "custom", "name": name, "import_path": f"{FROM_PYTHON}:{name}"}
            | ({} if isinstance(one, Environment) else _datasets(task))
            for name, one in task.environments.items()
        ]
    if source is None and not {"name", "resume"} & settings.keys():
        runs = Path(settings.get("runs", "runs"))  # a run without a name does not stand in the way of the next
        settings["name"] = next(name for n in count(1) if not (runs / (name := f"run-{n}")).exists())
    source = source.config if isinstance(source, LoadedConfig) else source
    if isinstance(source, RunConfig) and not settings:
        return source, _environments(source, task)
    loaded = load(source, settings=settings)
    for warning in loaded.warnings:
        warnings.warn(warning, ConfigWarning, stacklevel=3)
    return loaded.config, _environments(loaded.config, task)


def _refuse(task: TrainingTask, settings: Mapping[str, Any]) -> None:
    """Raise a sentence where the arguments contradict one another."""
    problems = {
        "reward: name the rows to train on, with dataset=...": task.reward is not None and task.dataset is None,
        "give either `reward` or `environments`, not both": task.reward is not None and bool(task.environments),
        "give either `reward` or `env`, not both": task.reward is not None and "env" in settings,
        "reward_weights: there is nothing to weigh; give reward=[...] too": (
            task.reward is None and task.reward_weights is not None
        ),
        "dataset: say what a completion is worth, with reward=...": (
            task.reward is None and not task.environments and (task.dataset, task.eval_dataset) != (None, None)
        ),
    }
    if sentences := [f"{PYTHON}: {sentence}" for sentence, wrong in problems.items() if wrong]:
        raise ConfigError(sentences)


def _environments(config: RunConfig, task: TrainingTask) -> dict[str, Environment]:
    """The environments that are objects, by the name of their section."""
    if task.reward is not None:
        (section,) = config.env
        assert isinstance(section, RewardEnvConfig)
        if isinstance(task.reward, str) and not task.rows:
            return {}  # the run file says it all
        rewards = import_object(task.reward) if isinstance(task.reward, str) else task.reward
        return {section.name: RewardEnvironment(section, rewards, task.rows)}
    sections = {section.name: section for section in config.env}
    objects: dict[str, Environment] = {}
    for name, environment in task.environments.items():
        section = sections.get(name)
        if isinstance(environment, Environment):
            objects[name] = environment
        elif isinstance(section, CustomEnvConfig) and inspect.iscoroutinefunction(environment):
            objects[name] = FunctionEnvironment(environment, section, task.rows)
        else:
            known = ", ".join(f"`{section}`" for section in sections)
            raise ConfigError(
                [
                    f"{PYTHON}: environments: `{name}` is {environment!r:.80}: give a paceline.Environment object, or "
                    f'an async function rollout(row, seat) for a section of type = "custom"; the run has {known}'
                ]
            )
    return objects


def _reward_section(task: TrainingTask, name: str | None) -> dict[str, Any]:
    """The [[env]] that a dataset and a reward stand for."""
    assert task.dataset is not None
    assert task.reward is not None
    stem = Path(task.dataset).stem if isinstance(task.dataset, str | PurePath) else ""
    section: dict[str, Any] = {
        "type": "reward",
        "name": stem if re.fullmatch(FOLDER_NAME, stem) and stem != "all" else name or "reward",
        "import_path": task.reward if isinstance(task.reward, str) else f"{FROM_PYTHON}:reward",
        **_datasets(task),
    }
    return section | ({"reward_weights": _weights(task)} if task.reward_weights is not None else {})


def _datasets(task: TrainingTask) -> dict[str, Any]:
    """The keys `dataset` and `eval_dataset`; rows that are objects have a name that says so."""
    sources = {"dataset": task.dataset, "eval_dataset": task.eval_dataset}
    return {
        key: plain_value(rows) if _is_named(rows) else f"{FROM_PYTHON}:{key}"
        for key, rows in sources.items()
        if rows is not None
    }


def _weights(task: TrainingTask) -> dict[str, float]:
    """By the functions' names."""
    rewards = import_object(task.reward) if isinstance(task.reward, str) else task.reward
    assert rewards is not None
    if isinstance(task.reward_weights, Mapping):
        weights = {str(name): float(weight) for name, weight in task.reward_weights.items()}
        reward_functions(rewards, weights)
        return weights
    names = [function.name for function in reward_functions(rewards, {})]
    weights_in_order = [float(weight) for weight in task.reward_weights or ()]
    if len(names) != len(weights_in_order):
        counts = f"{len(weights_in_order)} weights for {len(names)} reward functions"
        raise ConfigError([f"{PYTHON}: reward_weights: {counts}: give one for each of them"])
    return dict(zip(names, weights_in_order, strict=True))


def _is_named(rows: Data) -> bool:
    """Whether rows are named as in a run file: by a path or URI, several, or several by weight."""
    if isinstance(rows, Mapping):
        return all(isinstance(weight, int | float) for weight in rows.values())
    return isinstance(rows, str | PurePath) or (
        isinstance(rows, list) and bool(rows) and all(isinstance(row, str | PurePath) for row in rows)
    )


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
    # In place of what this thread does about Ctrl-C: `asyncio.run` cancels its task and goes on, a kernel raises
    # KeyboardInterrupt in the middle of the wait.
    with on_interrupt(lambda number, frame: signals.interrupt()):
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
    directory = RunDirectory(Path(config.runs).absolute() / config.name)
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


__all__ = ["train"]
