"""The vital signs of a run, from its directory: what `paceline top` draws each second and `paceline report` tells.

Computes how busy each part of a run was recently.
"""

import math
import shlex
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.observe.monitor.directory import RunDirectory
from paceline.observe.monitor.summary import way_on
from paceline.observe.record import RunFolder, RunStatus, TimelineSpan
from paceline.observe.web.vitals import Curve, Stretch, binned, curves, ends, from_metrics, mean_curve, recorded, tags

MINUTE = 60.0
MOST_LINES = 400
"""Steps of a minute whose times are looked at, where nothing else was recorded."""

Columns = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class Busy:
    """One lane's share of the time, and what more there is to say."""

    lane: str
    share: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Busyness:
    """All lanes over the last `seconds` before a step ended; what goes on since then is not written down yet."""

    seconds: float
    lanes: list[Busy]


def busyness(run: RunFolder, columns: Columns, pace: float | None) -> Busyness:
    """A minute, or a whole step where one takes longer."""
    length = max(MINUTE, pace or 0.0)
    stamps = (stamp for stamp in reversed(columns.get("time", ())) if stamp is not None and math.isfinite(stamp))
    end = next(stamps, None)
    if end is None:
        return Busyness(length, [])
    start = end - length
    spans = run.lanes(start, end)
    tail = {name: column[-MOST_LINES:] for name, column in columns.items()}
    told = recorded(spans) or [one for one in from_metrics(tail) if start <= one.end <= end]
    start = max(start, min((one.start for one in told), default=start))
    by_lane: dict[str, list[Stretch]] = defaultdict(list)
    for one in told:
        if one.kind != "wait":
            by_lane[one.lane].append(replace(one, share=1.0) if one.kind == "playing" else one)
    lanes = [Busy(lane, _share(some, start, end), _episodes(spans, lane, start, end)) for lane, some in by_lane.items()]
    return Busyness(end - start, sorted(lanes, key=lambda one: _place(one.lane)))


def _share(stretches: Sequence[Stretch], start: float, end: float) -> float:
    return min(1.0, sum(part.share for part in binned(stretches, (start, end), 1)))


def _episodes(spans: Sequence[TimelineSpan], lane: str, start: float, end: float) -> str:
    playing = [span for span in spans if span.lane == lane and span.kind == "playing"]
    if not playing or end <= start:
        return ""
    total = sum(span.value * max(0.0, min(span.end, end) - max(span.start, start)) for span in playing)
    return f"{total / (end - start):.1f} episodes at once"


def _place(lane: str) -> tuple[int, str]:
    known = ("engine", "trainer", "publish", "environment", "evaluation")
    return next((place for place, start in enumerate(known) if lane.startswith(start)), len(known)), lane


FEW = 10
"""Steps that `now` means: one alone is mostly noise."""
WAITING = 0.3
"""Share of its time from which the trainer is said to wait."""
BUSY = 0.65
"""Share of its time below which the sampler is."""
MOST_EVENTS = 200
MEANING = {
    "running": "it is training now",
    "starting": "it loads its model and has not begun to train",
    "finished": "it trained all its steps",
    "interrupted": "it was stopped and can be resumed",
    "failed": "it stopped because of an error",
    "crashed": "its process is gone and wrote no end: killed, out of memory, or the machine stopped",
}


@dataclass(frozen=True, slots=True)
class MetricTrend:
    """How a measure went: where it began, where it is, and the curve between."""

    curve: Curve
    first: float
    last: float

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.curve]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """A run at one moment."""

    name: str
    path: Path
    now: float
    status: RunStatus
    tags: list[str]
    allowed: int | None
    """The staleness that the run file allows."""
    seen: float | None
    """When it last wrote something down."""
    pace: float | None
    """Seconds a step, evaluations between them included."""
    left: float | None
    rewards: dict[str, MetricTrend]
    """By environment; `""` is their mean."""
    held_out: dict[str, MetricTrend]
    kind: str
    """What `held_out` measures: `exact` or `reward`."""
    recent: dict[str, float]
    """Every metric's mean over the last few steps."""
    dropped: dict[str, int]
    """Since the start, by reason."""
    busy: Busyness
    waits: str
    events: list[dict[str, Any]]
    columns: Columns = field(repr=False)
    """The metrics it was made of."""

    @property
    def why(self) -> str:
        """The state in a sentence."""
        return self.status.message or MEANING[self.status.state]

    @property
    def losses(self) -> dict[str, float]:
        """The loss by component; `loss` is their sum."""
        return {name: value for name, value in self.recent.items() if name == "loss" or name.startswith("loss/")}

    @property
    def onward(self) -> tuple[str, str]:
        """The next action on a run that is over, and its command; nothing while it lives."""
        if self.status.alive:
            return "", ""
        if self.status.state == "finished":
            file = shlex.quote(str(self.path / "config.toml"))
            return "to train on", f"paceline train {file} --resume latest --steps {2 * max(1, self.status.step)}"
        saved = RunDirectory(self.path).checkpoints.glob("step-*/state.json")
        checkpoint = max((file.parent for file in saved), default=None)
        return way_on(RunDirectory(self.path), checkpoint, bool(self.status.step))


def signs(run: RunFolder, now: float | None = None, before: Signs | None = None) -> Signs:
    """The run as it is now. Where no step came since `before`, curves are not looked through again."""
    now = time.time() if now is None else now
    status, columns = run.status(), run.metrics()
    times = [stamp for stamp in columns.get("time", [])[-2 * FEW - 1 :] if stamp is not None and math.isfinite(stamp)]
    seen = max([*times[-1:], status.began or 0.0, status.ended or 0.0]) or None
    pace = _pace(times, status.began)
    left, events = _left(status, pace, now, times), run.events()[-MOST_EVENTS:]
    if before is not None and before.columns is columns:
        return replace(before, now=now, status=status, seen=seen, pace=pace, left=left, events=events)
    config, recent = run.config(), _recent(columns)
    exact, stale = curves(columns, "eval/", "/exact"), config.get("staleness")
    return Signs(
        name=run.name,
        path=run.path,
        now=now,
        status=status,
        tags=tags(config),
        allowed=stale if isinstance(stale, int) else None,
        seen=seen,
        pace=pace,
        left=left,
        rewards=_courses(curves(columns, "reward/", "/mean")),
        held_out=_courses(exact or curves(columns, "eval/", "/reward")),
        kind="exact" if exact else "reward",
        recent=recent,
        dropped=_dropped(columns),
        busy=busyness(run, columns, pace),
        waits=_waits(recent),
        events=events,
        columns=columns,
    )


def _courses(by_env: dict[str, Curve]) -> dict[str, MetricTrend]:
    found = {"": mean_curve(list(by_env.values())), **by_env} if by_env else {}
    return {
        env: MetricTrend(curve, told["first"], told["last"]) for env, curve in found.items() if (told := ends(curve))
    }


def _pace(times: Sequence[float], began: float | None) -> float | None:
    """The time between two lives of a run is no step's."""
    lived = [stamp for stamp in times if began is None or stamp >= began]
    return (lived[-1] - lived[0]) / (len(lived) - 1) if len(lived) > 2 else None


def _left(status: RunStatus, pace: float | None, now: float, times: Sequence[float]) -> float | None:
    if status.state != "running" or pace is None or status.total_steps is None:
        return None
    return max(0.0, pace * (status.total_steps - status.step) - max(0.0, now - times[-1]))


def _recent(columns: Columns) -> dict[str, float]:
    found = {}
    for name, column in columns.items():
        values = [value for value in column[-FEW:] if value is not None and math.isfinite(value)]
        if values:
            found[name] = statistics.fmean(values)
    return found


def _dropped(columns: Columns) -> dict[str, int]:
    totals = {
        name.removeprefix("dropped/"): round(math.fsum(value for value in column if value and math.isfinite(value)))
        for name, column in columns.items()
        if name.startswith("dropped/")
    }
    return {reason: total for reason, total in totals.items() if total}


def _waits(recent: Mapping[str, float]) -> str:
    """Whether sampler or trainer waits, as the page of a run says it."""
    wait, sampler = recent.get("wait_time_ratio", 0.0), recent.get("busy/sampler", 1.0)
    if not {"busy/trainer", "wait_time_ratio"} & set(recent):
        return "not measured"
    if sampler < BUSY and not (wait > WAITING and wait >= 1 - sampler):
        return f"the sampler, for the trainer ({1 - sampler:.0%})"
    return f"the trainer, for rollouts ({wait:.0%})" if wait > WAITING else "neither for long"
