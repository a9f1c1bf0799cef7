"""Turns the arguments of `paceline.train` into a config and environments."""

import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path, PurePath
from typing import Any

from paceline.config import ConfigError, ConfigWarning, LoadedConfig, RunConfig, load
from paceline.config.document import PYTHON, plain_value
from paceline.config.env import CustomEnvConfig, RewardEnvConfig
from paceline.config.run import FOLDER_NAME
from paceline.data import Row
from paceline.envs import Environment, Split
from paceline.envs.custom import FunctionEnvironment
from paceline.envs.reward import RewardEnvironment, Rewards, reward_functions
from paceline.util.importing import FROM_PYTHON, import_object

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
        settings["env"] = [_custom_section(name, one, task) for name, one in task.environments.items()]
    if source is None and not {"name", "resume"} & settings.keys():
        settings["name"] = _free_name(Path(settings.get("runs", "runs")))
    config = _config(source, settings)
    return config, _environments(config, task)


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


def _config(source: Source | None, settings: dict[str, Any]) -> RunConfig:
    source = source.config if isinstance(source, LoadedConfig) else source
    if isinstance(source, RunConfig) and not settings:
        return source
    loaded = load(source, settings=settings)
    for warning in loaded.warnings:
        warnings.warn(warning, ConfigWarning, stacklevel=4)
    return loaded.config


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
            raise ConfigError([_no_section(name, environment, sections)])
    return objects


def _no_section(name: str, value: object, sections: Mapping[str, object]) -> str:
    known = ", ".join(f"`{section}`" for section in sections)
    return (
        f"{PYTHON}: environments: `{name}` is {value!r:.80}: give a paceline.Environment object, or an async function "
        f'rollout(row, seat) for a section of type = "custom"; the run has {known}'
    )


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


def _custom_section(name: str, environment: EnvironmentLike, task: TrainingTask) -> dict[str, Any]:
    section = {"type": "custom", "name": name, "import_path": f"{FROM_PYTHON}:{name}"}
    return section if isinstance(environment, Environment) else section | _datasets(task)


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


def _free_name(runs: Path) -> str:
    """A run without a name does not stand in the way of the next: `run-1`, `run-2`, ..."""
    return next(name for number in count(1) if not (runs / (name := f"run-{number}")).exists())
