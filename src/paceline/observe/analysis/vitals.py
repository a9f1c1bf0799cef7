"""Computes the vital signs of a run from its directory: state, pace, reward, evaluation, recent metrics and load."""

import hashlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.observe.analysis.health import RunHealth, run_health
from paceline.observe.analysis.timeline import Columns, RecentLoad, recent_load
from paceline.observe.monitor.directory import RunDirectory
from paceline.observe.monitor.summary import TREND_STEPS, MetricTrend, next_action
from paceline.observe.monitor.text import format_count
from paceline.observe.record import RunFolder, RunStatus

SPARK_POINTS = 48
"""Points of the small curve in the table of runs."""
FAMILY_IGNORED_KEYS = ("seed", "name", "runs", "resume", "schema_version")
"""Keys in which two tries of one experiment may differ."""
RECENT_STEPS = 10
"""Steps that `now` means: one alone is mostly noise."""
WAIT_SHARE = 0.3
"""Share of its time from which the trainer is said to wait."""
BUSY_SHARE = 0.65
"""Share of its time below which the sampler is."""
MOST_EVENTS = 200
STATE_MEANINGS = {
    "running": "it is training now",
    "starting": "it loads its model and has not begun to train",
    "finished": "it trained all its steps",
    "interrupted": "it was stopped and can be resumed",
    "failed": "it stopped because of an error",
    "crashed": "its process is gone and wrote no end: killed, out of memory, or the machine stopped",
}


Trends = dict[str, MetricTrend]
"""By environment; `""` is their mean."""


def reward_trends(columns: Columns) -> tuple[Trends, Trends, str]:
    """Training reward, held-out results, and what those measure: `exact`, or `reward` where that is missing."""
    exact = _trends(columns, "eval/", "/exact", 1)
    held_out = exact or _trends(columns, "eval/", "/reward", 1)
    return _trends(columns, "reward/", "/mean", TREND_STEPS), held_out, "exact" if exact else "reward"


def _trends(columns: Columns, start: str, end: str, window: int) -> Trends:
    """The metrics `start<environment>end`. Those of its actors (`eval/<environment>/<actor>/reward`) count where the
    environment has none of its own, as in the evaluation of an arena."""
    found: dict[str, list[tuple[float, float]]] = {}
    by_step: dict[float, list[float]] = {}
    envs = [name.removeprefix(start).removesuffix(end) for name in columns]
    envs = [env for env in envs if env and f"{start}{env}{end}" in columns]
    for env in envs:
        if env.rpartition("/")[0] not in envs:
            pairs = zip(columns["step"], columns[f"{start}{env}{end}"], strict=True)
            pairs = [(step, value) for step, value in pairs if step is not None and value is not None]
            found[env] = pairs
            for step, value in pairs:
                by_step.setdefault(step, []).append(value)
    mean = [(step, statistics.fmean(values)) for step, values in sorted(by_step.items())]
    return {env: MetricTrend.of(points, window) for env, points in {"": mean, **found}.items() if points}


def headline(rewards: Trends, held_out: Trends, kind: str) -> dict[str, Any]:
    """What `reward_trends` found over all environments, as every page shows it."""
    return {"reward": _trend_ends(rewards.get("")), "eval": _trend_ends(held_out.get("")), "eval_kind": kind}


def _trend_ends(trend: MetricTrend | None) -> dict[str, Any] | None:
    if trend is None:
        return None
    ends = {name: getattr(trend, name) for name in ("first", "last", "first_steps", "last_steps")}
    return ends | {"moved": trend.has_moved}


def last_written(columns: Columns, status: RunStatus) -> float | None:
    stamps = [stamp for stamp in columns.get("time", ()) if stamp is not None]
    return max([*stamps[-1:], status.began or 0.0, status.ended or 0.0]) or None


def table_row(name: str, run: RunFolder, problems: list[str]) -> dict[str, Any]:
    """State, health, step, reward, evaluation, age and tags of a run, and what could not be read of it. Never fails."""
    status = run.status()  # first: what is written before a run counts as running is then there to be read
    columns, config = run.metrics(), run.config()
    rewards, held_out, kind = reward_trends(columns)
    shown = ("state", "alive", "step", "total_steps", "began", "ended", "message")
    return {
        "name": name,
        **{key: getattr(status, key) for key in shown},
        "seen": last_written(columns, status),
        **headline(rewards, held_out, kind),
        "health": asdict(run_health(run, columns, not status.alive)),
        "spark": _spark(rewards[""].values) if rewards else [],
        "tags": tags(config),
        "seed": config.get("seed"),
        "family": family(config),
        "problems": problems,
    }


def _spark(values: list[float]) -> list[float]:
    """At most `SPARK_POINTS` values: means of neighbours."""
    if len(values) <= SPARK_POINTS:
        return values
    edges = [round(index * len(values) / SPARK_POINTS) for index in range(SPARK_POINTS + 1)]
    return [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]


def tags(config: Mapping[str, Any]) -> list[str]:
    """Names of the run's environments, algorithms and model."""
    envs, model, found = config.get("env"), config.get("model"), []
    for env in envs if isinstance(envs, list) else []:
        if isinstance(env, dict):
            found += [str(env.get("name") or env.get("type") or ""), _type(env.get("algo"))]
    found.append(_type(config.get("algo")) if not envs else "")
    if isinstance(model, dict):
        found.append(str(model.get("name", "")).rstrip("/").rpartition("/")[2].removeprefix("paceline:"))
        found.append("lora" if model.get("lora") else "")
    return [tag for tag in dict.fromkeys(found) if tag][:8]


def _type(section: Any) -> str:
    return str(section.get("type", "")) if isinstance(section, dict) else ""


def family(config: Mapping[str, Any]) -> str:
    """The same for runs that differ only in their seed; empty where there is no run file to tell."""
    if not config:
        return ""
    rest = {key: value for key, value in config.items() if key not in FAMILY_IGNORED_KEYS}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    name: str
    path: Path
    now: float
    status: RunStatus
    health: RunHealth
    tags: list[str]
    max_staleness: int | None
    """The staleness that the run file allows."""
    last_seen: float | None
    """When it last wrote something down."""
    pace: float | None
    """Seconds a step, evaluations between them included."""
    seconds_left: float | None
    rewards: Trends
    held_out: Trends
    eval_kind: str
    """What `held_out` measures: `exact` or `reward`."""
    recent_means: dict[str, float]
    """Every metric's mean over the last few steps."""
    dropped_counts: dict[str, int]
    """Since the start, by reason."""
    load: RecentLoad
    events: list[dict[str, Any]]
    columns: Columns = field(repr=False)
    """The metrics it was made of."""

    @property
    def facts(self) -> list[str]:
        """What it trains, with what, on which device."""
        size = f"{format_count(self.status.parameters)} parameters" if self.status.parameters else ""
        return [fact for fact in (*self.tags, self.status.device, size) if fact]

    @property
    def state_reason(self) -> str:
        return self.status.message or STATE_MEANINGS[self.status.state]

    @property
    def losses(self) -> dict[str, float]:
        """The loss by component; `loss` is their sum."""
        return {name: value for name, value in self.recent_means.items() if name == "loss" or name.startswith("loss/")}

    @property
    def next_action(self) -> tuple[str, str]:
        """The next action on a run that is over, and its command; nothing while it lives."""
        if self.status.alive:
            return "", ""
        finished = self.status.step if self.status.state == "finished" else None
        files = RunDirectory(self.path)
        return next_action(files, files.newest_checkpoint(), bool(self.status.step), finished)

    @property
    def waiting_side(self) -> str:
        """Whether sampler or trainer waits, as the page of a run says it."""
        recent = self.recent_means
        wait, sampler = recent.get("wait_time_ratio", 0.0), recent.get("busy/sampler", 1.0)
        if not {"busy/trainer", "wait_time_ratio"} & set(recent):
            return "not measured"
        if sampler < BUSY_SHARE and not (wait > WAIT_SHARE and wait >= 1 - sampler):
            return f"the sampler, for the trainer ({1 - sampler:.0%})"
        return f"the trainer, for rollouts ({wait:.0%})" if wait > WAIT_SHARE else "neither for long"


def vitals(run: RunFolder, now: float | None = None, before: Vitals | None = None) -> Vitals:
    """The run as it is now. Where no step came since `before`, curves are not looked through again."""
    now = time.time() if now is None else now
    status, columns = run.status(), run.metrics()
    times = [stamp for stamp in columns["time"][-2 * RECENT_STEPS - 1 :] if stamp is not None]
    seen, pace = last_written({"time": times}, status), _pace(times, status.began)
    moment: dict[str, Any] = {"now": now, "status": status, "last_seen": seen, "pace": pace}
    moment |= {"seconds_left": _seconds_left(status, pace, now, times), "events": run.events()[-MOST_EVENTS:]}
    if before is not None and before.columns is columns and before.status.alive == status.alive:
        return replace(before, **moment)
    config = run.config()
    rewards, held_out, kind = reward_trends(columns)
    stale = config.get("staleness")
    return Vitals(
        **moment,
        name=run.name,
        path=run.path,
        health=run_health(run, columns, not status.alive),
        tags=tags(config),
        max_staleness=stale if isinstance(stale, int) else None,
        rewards=rewards,
        held_out=held_out,
        eval_kind=kind,
        recent_means=_recent_means(columns),
        dropped_counts=_dropped_counts(columns),
        load=recent_load(run, columns, pace),
        columns=columns,
    )


def _pace(times: Sequence[float], began: float | None) -> float | None:
    """The time between two lives of a run is no step's."""
    lived = [stamp for stamp in times if began is None or stamp >= began]
    return (lived[-1] - lived[0]) / (len(lived) - 1) if len(lived) > 2 else None


def _seconds_left(status: RunStatus, pace: float | None, now: float, times: Sequence[float]) -> float | None:
    if status.state != "running" or pace is None or status.total_steps is None:
        return None
    return max(0.0, pace * (status.total_steps - status.step) - max(0.0, now - times[-1]))


def _recent_means(columns: Columns) -> dict[str, float]:
    recent = {
        name: [value for value in column[-RECENT_STEPS:] if value is not None] for name, column in columns.items()
    }
    return {name: statistics.fmean(values) for name, values in recent.items() if values}


def _dropped_counts(columns: Columns) -> dict[str, int]:
    dropped = {name: column for name, column in columns.items() if name.startswith("dropped/")}
    totals = {name.removeprefix("dropped/"): round(math.fsum(filter(None, dropped[name]))) for name in dropped}
    return {reason: total for reason, total in totals.items() if total}
