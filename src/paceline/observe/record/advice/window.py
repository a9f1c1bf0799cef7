"""The window that advisories read: the last steps of a run, bounded in size, from its directory or from memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.filters import AdviceConfig, AdvisoryName
from paceline.observe.record.advice.measures import MOST_ROLLOUTS, Knob
from paceline.observe.record.advice.prompts import PromptFacts, prompt_facts
from paceline.observe.record.folder import RunFolder, resolved_config
from paceline.observe.record.layout import NOWHERE, REPLAYED, TRAINING
from paceline.observe.record.rollouts import RecordView, TextRecordView
from paceline.observe.record.rows import RolloutNotFound

MOST_ROWS = 400_000
"""Of a window that holds more, the newest are enough for any of the figures."""
MOST_READ = 600
"""Rollouts of an environment whose own metrics are read."""

MOST_PROMPTS = 256
"""Rollouts whose prompts a rule reads; a record holds them with all their tokens."""

SELF_PLAY = ("arena", "textarena")
"""Environments that several copies of the policy play against each other."""

Columns = Mapping[str, Sequence[float | None]]
Measured = Callable[[int], Mapping[str, Any]]
"""The environment's metrics of a rollout, by its number."""

Prompted = Callable[[int], PromptFacts | None]
"""What advisories need of a rollout's prompt, by its number; None where it was not kept."""


class Groups(NamedTuple):
    """Groups of an environment, a number in each array for every one."""

    low: NDArray[Any]
    """The lowest reward in it."""
    high: NDArray[Any]
    first: NDArray[Any]
    """Where its first rollout is among the rows."""


@dataclass(frozen=True)
class AdviceWindow:
    """The last steps of a run. Rules read it and change nothing."""

    config: Mapping[str, Any]
    columns: Columns
    rows: NDArray[Any]
    """`layout.ROW`s of the window alone, the first being number `first` of the record."""
    names: Mapping[tuple[str, str], int]
    """The numbers that rows have for names, by column and name."""
    first: int = 0
    measured: Measured = lambda index: {}
    prompted: Prompted = lambda index: None
    notes: Sequence[str] = ()
    """What the run has said since the window began, in a directory."""
    whole: bool = True
    """Whether every rollout is among the rows, and not a few of each step."""
    _read: dict[str, "MetricTable"] = field(default_factory=dict)
    _prompts: dict[int, PromptFacts | None] = field(default_factory=dict)

    @cached_property
    def advice(self) -> AdviceConfig:
        return advice_limits(self.config)

    @cached_property
    def steps(self) -> tuple[int, int]:
        """The first and the last step of the window."""
        return select_window(self.columns, self.rows, self.advice.steps)

    @cached_property
    def trained(self) -> int:
        """How many steps of the window there are."""
        return len(self.series("batch/rollouts")[0]) or len(self.series("loss")[0])

    @cached_property
    def envs(self) -> list[str]:
        return [str(env.get("name") or env.get("type")) for env in self.config.get("env", ()) if isinstance(env, dict)]

    def env(self, name: str) -> Mapping[str, Any]:
        """The environment's section of the run file."""
        return self.config["env"][self.envs.index(name)] if name in self.envs else {}

    def is_self_play(self, name: str) -> bool:
        """Whether its training reward is that of both sides together, and says nothing of progress."""
        return self.env(name).get("type") in SELF_PLAY

    def series(self, name: str, since: int | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Steps and values of a metric in the window, or from the step `since` on; without gaps."""
        since = self.steps[0] if since is None else since
        steps = self.columns.get("step", ())
        start = len(steps)
        while start and (steps[start - 1] or 0) >= since:
            start -= 1
        x, y = (np.array(self.columns.get(key, ())[start:], float) for key in ("step", name))  # None becomes NaN
        if len(x) != len(y):
            return np.empty(0), np.empty(0)
        there = np.isfinite(x) & np.isfinite(y) & (x > 0)
        return x[there], y[there]

    def full_series(self, name: str) -> NDArray[Any]:
        """A metric from the run's beginning on, without gaps."""
        values = np.array(self.columns.get(name, ()), float)
        return values[np.isfinite(values)]

    def finished_rows(self, env: str, domain: int = TRAINING, untrained: bool = False) -> NDArray[Any]:
        """Where in `rows` the environment's rollouts are that came to an end with a reward; with `untrained` also those
        of a step that has not trained yet."""
        rows = self.rows
        mine = (rows["env"] == self.number("env", env)) & (rows["domain"] == domain) & np.isfinite(rows["reward"])
        mine &= (rows["error"] == 0) & (rows["state"] != self.number("state", REPLAYED))
        if domain == TRAINING:
            mine &= (rows["step"] >= self.steps[0]) & (untrained | (rows["step"] <= self.steps[1]))
        return np.flatnonzero(mine)

    def groups(self, env: str, untrained: bool = False) -> Groups:
        """Tries of one row by one actor, two or more; with `untrained`, of before the first step too."""
        places = self.finished_rows(env, untrained=untrained)
        keys, rewards = _group_keys(self.rows[places]), self.rows["reward"][places]
        _, first, group, size = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        low, high = np.full(len(size), np.inf), np.full(len(size), -np.inf)
        np.minimum.at(low, group, rewards)
        np.maximum.at(high, group, rewards)
        return Groups(*(column[size > 1] for column in (low, high, places[first])))

    def by_step(self, env: str, values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Steps, and the mean over each of what `places` counted."""
        steps = self.rows["step"][self.finished_rows(env)]
        found, place = np.unique(steps, return_inverse=True)
        return found.astype(float), np.bincount(place, values) / np.maximum(1, np.bincount(place))

    def numbers(self, places: NDArray[Any], by: NDArray[Any] | None = None) -> list[int]:
        """Numbers in the record of a few rows: the first, or those with the lowest values."""
        ordered = places if by is None else places[np.argsort(by, kind="stable")]
        return (self.first + ordered[:MOST_ROLLOUTS]).tolist()

    def number(self, column: str, name: str) -> int:
        """The number that rows have for a name; one that none can have where no row has it."""
        return self.names.get((column, name), NOWHERE)

    def table(self, env: str) -> "MetricTable":
        """The environment's metrics of its newest rollouts."""
        if env not in self._read:
            places = self.finished_rows(env)[-MOST_READ:]
            rows, measured = self.rows[places], [self.measured(number) for number in (self.first + places).tolist()]
            names = sorted({name for metrics in measured for name in metrics})
            columns = {name: np.array([_number(metrics.get(name)) for metrics in measured]) for name in names}
            groups = np.unique(_group_keys(rows), return_inverse=True)[1] if len(rows) else np.empty(0, int)
            self._read[env] = MetricTable(places, rows["reward"].astype(float), groups, columns)
        return self._read[env]

    def prompts(self, places: NDArray[Any]) -> "PromptTable":
        """The prompts of the newest of these rows, without those that were not kept."""
        places = places[-MOST_PROMPTS:]
        new = [place for place in places.tolist() if place not in self._prompts]
        self._prompts.update((place, self.prompted(self.first + place)) for place in new)
        kept = [(place, facts) for place in places.tolist() if (facts := self._prompts[place]) is not None]
        return PromptTable(
            np.array([place for place, _ in kept], int),
            [facts.digest for _, facts in kept],
            [facts.token_digest for _, facts in kept],
            np.array([facts.holds_answer for _, facts in kept], bool),
            np.array([facts.right is not None for _, facts in kept], bool),
            [facts.right for _, facts in kept],
            [facts.marker for _, facts in kept],
        )

    def get(self, key: str, otherwise: Any = None) -> Any:
        """A value of the run file by its dotted key."""
        table: Any = self.config
        for part in key.split("."):
            table = table.get(part) if isinstance(table, Mapping) else None
        return otherwise if table is None else table

    def knob(self, key: str, value: Any, why: str) -> Knob:
        return Knob(key, value, self.get(key), why)

    def pause_knobs(self, rule: AdvisoryName, why: str) -> list[Knob]:
        """Where other environments can go on meanwhile: the key that draws nothing from one that the rule speaks of."""
        return [self.knob("advice.pause", [rule], why)] if len(self.envs) > 1 else []

    def env_knob(self, env: str, key: str, value: Any, why: str) -> Knob:
        return Knob(f"env[{self.envs.index(env)}].{key}", value, self.env(env).get(key), why)


@dataclass(frozen=True)
class MetricTable:
    """Metrics of rollouts, side by side; NaN where one has it not."""

    places: NDArray[Any]
    rewards: NDArray[Any]
    groups: NDArray[Any]
    """Which belong together: the same number, from 0 on."""
    columns: dict[str, NDArray[Any]]

    def center_by_group(self, values: NDArray[Any]) -> NDArray[Any]:
        """The values less the mean of their group."""
        counts = np.maximum(1, np.bincount(self.groups))
        return values - (np.bincount(self.groups, values) / counts)[self.groups]


class PromptTable(NamedTuple):
    """Prompts of rollouts, side by side."""

    places: NDArray[Any]
    digests: list[bytes]
    token_digests: list[bytes]
    holds_answer: NDArray[Any]
    is_right: NDArray[Any]
    examples: list[tuple[str, str] | None]
    """The expected answer and the reply of those."""
    markers: list[str]
    """Of the chat template, in replies; empty where there is none."""


def _group_keys(rows: NDArray[Any]) -> NDArray[Any]:
    """A number for each row that tries of one row by one actor share."""
    return rows["ticket"] * 65536 + rows["actor"]


def advice_window(run: RunFolder, until: int | None = None) -> AdviceWindow:
    """The run's directory as it is now, or as it was at the step `until`. The config is empty where it is another
    version's, so that nothing is said of environments."""
    try:
        config = resolved_config(run.config())
    except ValueError:
        config = {}
    columns, ends = run.metrics(), inf
    view = run.rollouts.view()
    kept = run.rollouts.keeps_all
    rows = view.rows
    if until is not None:
        lines = sum(1 for step in columns["step"] if step is not None and step <= until)
        ends = next((time for time in columns.get("time", ())[lines:] if time is not None), inf)
        columns = {name: column[:lines] for name, column in columns.items()}
        rows = rows[: int(np.searchsorted(rows["step"], until, side="right"))]
    low, _ = select_window(columns, rows, advice_limits(config).steps)
    first = int(np.searchsorted(rows["step"], low)) if kept else 0
    first = max(first, len(rows) - MOST_ROWS)
    rows = np.array(rows[first:]) if kept else rows[:0]
    began = next((time for time in columns.get("time", ())[-advice_limits(config).steps :] if time is not None), 0.0)
    said = [event for event in run.events() if event.get("event") == "note" and began <= event.get("time", 0.0) <= ends]
    notes = [str(event.get("text")) for event in said]
    names = {key: number for number, key in enumerate(zip(view.kinds, view.names, strict=True))}
    return AdviceWindow(
        config, columns, rows, names, first, view.metrics_of, lambda index: _prompt(view, index), notes, kept
    )


def _prompt(view: RecordView | TextRecordView, index: int) -> PromptFacts | None:
    try:
        body = view.read(index)
        return prompt_facts(body.turns, body.target)
    except RolloutNotFound:
        return None


def advice_limits(config: Mapping[str, Any]) -> AdviceConfig:
    """The run's own limits; the usual ones where it has none that this version understands."""
    try:
        return AdviceConfig.model_validate(config.get("advice", {}))
    except ValueError:
        return AdviceConfig()


def select_window(columns: Columns, rows: NDArray[Any], length: int) -> tuple[int, int]:
    last = max((int(step) for step in columns.get("step", ())[-1:] if step is not None), default=0)
    last = last or int(rows["step"].max(initial=0))
    return max(1, last - length + 1), last


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else np.nan
