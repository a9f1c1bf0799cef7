"""Folds a run's metrics into the curves that screen, plot and summary show, and writes the lines a run ends with."""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeGuard

from paceline.observe.monitor.base import RunOutcome
from paceline.observe.monitor.directory import RunDirectory
from paceline.observe.monitor.text import format_amount, format_score, format_seconds, one_line, restore_paths

Curve = list[tuple[int, float]]
"""Points (step, value), in the order they came."""


class MetricHistory:
    """What the metrics say so far. Values that are missing or not finite leave no point."""

    def __init__(self, envs: Iterable[str] = ()) -> None:
        self.step = 0
        self.latest: dict[str, float] = {}
        """The last value of every metric."""
        self.rewards: dict[str, Curve] = {env: [] for env in envs}
        """Training reward by environment."""
        self.exact: dict[str, Curve] = {}
        """Share of held-out rows that are exactly right, by environment."""
        self.held_out: dict[str, Curve] = {}
        """Held-out reward by environment."""
        self.dropped: Counter[str] = Counter()
        """Rollouts dropped since the start, by reason."""
        self.seconds = 0.0
        """Time spent in steps."""

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]], envs: Iterable[str] = ()) -> Self:
        """The history of `metrics.jsonl`."""
        history = cls(envs)
        for line in lines:
            history.add(line["step"], line)
        return history

    @property
    def envs(self) -> list[str]:
        return list(dict.fromkeys([*self.rewards, *self.exact, *self.held_out]))

    @property
    def has_trained(self) -> bool:
        return any(self.rewards.values())

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self.step = max(self.step, step)
        values = {key: value for key, value in metrics.items() if _finite(value)}
        self.latest.update(values)
        self.seconds += values.get("time/step", 0.0)
        curves = {("reward", "mean"): self.rewards, ("eval", "exact"): self.exact, ("eval", "reward"): self.held_out}
        for key, value in values.items():
            family, _, rest = key.partition("/")
            env, _, field = rest.rpartition("/")  # the name of an environment may hold slashes of its own
            if (family, field) in curves:
                curves[family, field].setdefault(env, []).append((step, value))
            elif family == "dropped":
                self.dropped[rest] += round(value)


def _finite(value: float | None) -> TypeGuard[float]:
    """False for a NaN, and for the null that a file has in its place."""
    return value is not None and math.isfinite(value)


_TRAIN: Final = "paceline train"


def summary(metrics: Sequence[Mapping[str, Any]], outcome: RunOutcome, directory: Path) -> list[str]:
    """What was reached, where things are, and what to do next: one line each."""
    files = RunDirectory(directory)
    history = MetricHistory.of(metrics)
    lines = [
        _result_line(history, metrics, outcome),
        _paths_line(outcome, files),
        _next_line(outcome, files, bool(history.has_trained)),
    ]
    return [one_line(restore_paths(line)) for line in lines]


def _result_line(history: MetricHistory, metrics: Sequence[Mapping[str, Any]], outcome: RunOutcome) -> str:
    results = "; ".join(f"{env}: {_env_result(history, env)}" for env in history.envs)
    if history.has_trained:
        # Runs that did not time their steps: from the first line to the last.
        elapsed = history.seconds or metrics[-1].get("time", 0.0) - metrics[0].get("time", 0.0)
        results += f" over {format_amount(history.step, 'step')} in {format_seconds(elapsed)}"
    else:
        results = f"{results}; no batch was trained" if results else "no batch was trained"
    if outcome.status == "finished":
        return f"{results}; {outcome.message}" if outcome.message else results
    # Why a run failed is printed once, by the command that started it.
    cause = f": {outcome.message}" if outcome.message and outcome.status != "failed" else ""
    return f"{results}; {outcome.status} at step {outcome.step}{cause}"


def _env_result(history: MetricHistory, env: str) -> str:
    """Exact matches, or the held-out reward where there are none, then the reward in training."""
    parts = []
    if exact := history.exact.get(env):
        parts.append(f"exact {_format_course(exact)} on held-out rows")
    elif held_out := history.held_out.get(env):
        parts.append(f"reward {_format_course(held_out)} on held-out rows")
    if rewards := history.rewards.get(env):
        parts.append(f"{'in training' if parts and not exact else 'reward'} {_format_course(rewards)}")
    return ", ".join(parts)


def _format_course(curve: Curve) -> str:
    first, last = curve[0][1], curve[-1][1]
    return format_score(last, 2) if len(curve) == 1 else f"{format_score(first, 2)} -> {format_score(last, 2)}"


def _paths_line(outcome: RunOutcome, files: RunDirectory) -> str:
    places = [f"run {files.root}"]
    if files.plot.exists():
        places.append(f"curve {files.plot}")
    if outcome.export is not None:
        places.append(f"model {outcome.export}")
    elif outcome.checkpoint is not None:
        places.append(f"checkpoint {outcome.checkpoint}")
    return ", ".join(places)


def _next_line(outcome: RunOutcome, files: RunDirectory, trained: bool) -> str:
    if outcome.status == "finished":
        command = f"{_TRAIN} {shlex.quote(str(files.config_file))}"
        return f"to train on: {command} --resume latest --steps {2 * max(1, outcome.step)}"
    what, command = next_action(files, outcome.checkpoint, trained)
    return f"{what}: {command}"


def next_action(files: RunDirectory, checkpoint: Path | None, trained: bool) -> tuple[str, str]:
    """What can be done with a run that stopped, and the command for it. What was trained is never overwritten."""
    command = f"{_TRAIN} {shlex.quote(str(files.config_file))}"
    if checkpoint is not None:
        saved = [path.name for path in files.checkpoints.glob("step-*")]
        newest = checkpoint.name >= max(saved, default="")
        return f"to go on from {checkpoint.name}", f"{command} --resume {'latest' if newest else checkpoint.name}"
    if any(files.checkpoints.glob("step-*")):
        return f"to begin anew beside it (no checkpoint in {files.checkpoints} is whole)", f"{command} --name NAME"
    if trained:
        return "to begin anew beside it (no checkpoint was saved)", f"{command} --name NAME"
    return "to start again (no checkpoint was saved)", f"{command} --overwrite"
