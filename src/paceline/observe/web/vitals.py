"""A run in one line: what the table of runs shows, from its metrics, status and run file.

Bins the work of engine, trainer, publish and environments over time, few enough to draw.

A long run has more spans than a screen has pixels. Those of a crowded lane are put into bins: for each kind of work the
share of the bin it took, which the page draws as height. Zoomed in, the spans themselves come.
"""

import hashlib
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.observe.record import RunFolder, TimelineSpan

SPARKS = 48
"""Points of the small curve in the table."""
UNTOLD = ("seed", "name", "runs", "resume", "schema_version")
"""Keys in which two tries of one experiment may differ."""

Curve = list[tuple[float, float]]


def vitals(name: str, run: RunFolder, problems: list[str]) -> dict[str, Any]:
    """State, step, reward, evaluation, age and tags of a run, and what could not be read of it. Never fails."""
    columns, config, status = run.metrics(), run.config(), run.status()
    rewards = curves(columns, "reward/", "/mean")
    held_out = curves(columns, "eval/", "/exact") or curves(columns, "eval/", "/reward")
    reward = mean_curve(list(rewards.values()))
    evaluated = mean_curve(list(held_out.values()))
    seen = [value for value in columns.get("time", []) if value is not None]
    return {
        "name": name,
        "state": status.state,
        "alive": status.alive,
        "step": status.step,
        "total_steps": status.total_steps,
        "began": status.began,
        "ended": status.ended,
        "seen": max([*seen[-1:], status.began or 0.0, status.ended or 0.0]) or None,
        "message": status.message,
        "reward": ends(reward),
        "eval": ends(evaluated),
        "eval_kind": "exact" if curves(columns, "eval/", "/exact") else "reward",
        "spark": thinned([value for _, value in reward]),
        "tags": tags(config),
        "seed": config.get("seed"),
        "family": family(config),
        "problems": problems,
    }


def curves(columns: Mapping[str, Sequence[float | None]], start: str, end: str) -> dict[str, Curve]:
    """The curves `start<environment>end`, without those of single actors (`reward/<environment>/<actor>/mean`)."""
    steps = columns.get("step", [])
    found = {}
    for name, values in columns.items():
        inner = name.removeprefix(start).removesuffix(end)
        if name == f"{start}{inner}{end}" and inner and "/" not in inner:
            pairs = zip(steps, values, strict=False)
            found[inner] = [(s, v) for s, v in pairs if s is not None and v is not None and math.isfinite(v)]
    return {name: curve for name, curve in found.items() if curve}


def mean_curve(all_curves: list[Curve]) -> Curve:
    """The mean over environments, at the steps where each of those that have a value has one."""
    by_step: dict[float, list[float]] = {}
    for curve in all_curves:
        for step, value in curve:
            by_step.setdefault(step, []).append(value)
    return [(step, statistics.fmean(values)) for step, values in sorted(by_step.items())]


def ends(curve: Curve) -> dict[str, float] | None:
    """Where a curve began and where it is; the mean of a few steps, since one step is mostly noise."""
    if not curve:
        return None
    few = max(1, min(5, len(curve) // 4))
    values = [value for _, value in curve]
    return {"first": statistics.fmean(values[:few]), "last": statistics.fmean(values[-few:]), "points": len(values)}


def thinned(values: list[float]) -> list[float]:
    """At most SPARKS values: means of neighbours."""
    if len(values) <= SPARKS:
        return values
    cuts = [round(index * len(values) / SPARKS) for index in range(SPARKS + 1)]
    return [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(cuts)]


def tags(config: Mapping[str, Any]) -> list[str]:
    """Names of the run's environments, algorithms and model."""
    found: list[str] = []
    envs = config.get("env")
    for env in envs if isinstance(envs, list) else []:
        if isinstance(env, dict):
            found += [str(env.get("name") or env.get("type") or ""), _type(env.get("algo"))]
    found.append(_type(config.get("algo")) if not envs else "")
    model = config.get("model")
    if isinstance(model, dict):
        found.append(str(model.get("name", "")).rstrip("/").rpartition("/")[2].removeprefix("paceline:"))
        found.append("lora" if model.get("lora") else "")
    return [tag for tag in dict.fromkeys(found) if tag][:8]


def family(config: Mapping[str, Any]) -> str:
    """The same for runs that differ only in their seed; empty where there is no run file to tell."""
    if not config:
        return ""
    rest = {key: value for key, value in config.items() if key not in UNTOLD}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _type(section: Any) -> str:
    return str(section.get("type", "")) if isinstance(section, dict) else ""


PHASES = {"eval": "evaluation", "publish": "publish", "train": "trainer", "score": "trainer"}
"""The parts of a step, last first, and whose lane they stand in. Before them the trainer waits for its batch."""
ORDER = ("engine", "environment", "trainer", "publish", "evaluation")


@dataclass(frozen=True)
class Stretch:
    """One span of work on a lane; `share` is how much of the lane it takes."""

    lane: str
    kind: str
    start: float
    end: float
    step: int | None = None
    detail: str = ""
    share: float = 1.0


def lanes_of(run: RunFolder, start: float | None, end: float | None, bins: int) -> dict[str, Any]:
    """The lanes between two times, each with at most a few stretches a bin."""
    told = recorded(run.lanes(start, end))
    source = "record"
    if not told:
        source = "metrics"
        told = [one for one in from_metrics(run.metrics()) if _within(one, start, end)]
    if not told:
        return {"source": source, "extent": None, "lanes": []}
    extent = (min(one.start for one in told), max(one.end for one in told))
    extent = (extent[0] if start is None else start, extent[1] if end is None else end)
    by_lane: dict[str, list[Stretch]] = defaultdict(list)
    for one in told:
        by_lane[one.lane].append(one)
    lanes = []
    for lane in sorted(by_lane, key=_place):
        crowded = len(by_lane[lane]) > 2 * bins
        shown = binned(by_lane[lane], extent, bins) if crowded else by_lane[lane]
        spans = [[one.start, one.end, one.kind, round(one.share, 4), one.step, one.detail] for one in shown]
        lanes.append({"lane": lane, "binned": crowded, "spans": spans})
    return {"source": source, "extent": extent, "lanes": lanes}


def recorded(spans: Sequence[TimelineSpan]) -> list[Stretch]:
    """Spans as they were written down. What environments have is a number of episodes, shown beside the most."""
    most: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.kind == "playing":
            most[span.lane] = max(most[span.lane], span.value)
    found = []
    for span in spans:
        lane, kind, share, detail = span.lane, span.kind, 1.0, span.detail
        if span.kind == "playing":
            share, detail = span.value / (most[span.lane] or 1.0), detail or f"{span.value:.0f} episodes under way"
        elif span.kind == "busy":
            share, detail = span.value, detail or f"{span.value:.0%} of the time"
        elif lane == "run":
            lane, kind = PHASES.get(kind, "trainer"), "wait" if kind == "sample" else kind
        found.append(Stretch(lane, kind, span.start, span.end, span.step, detail, share))
    return found


def from_metrics(columns: Mapping[str, Sequence[float | None]]) -> list[Stretch]:
    """A run without recorded lanes still timed its phases: they lie one behind the other, up to the line's own time."""
    found = []
    rows = len(columns.get("time", []))

    def value(name: str, row: int) -> float:
        column = columns.get(name)
        return (column[row] if column is not None else None) or 0.0

    for row in range(rows):
        end, step = value("time", row), int(value("step", row))
        if not end:
            continue
        whole = value("time/step", row)
        for phase, lane in PHASES.items():
            seconds = value(f"time/{phase}", row)
            if seconds > 0:
                found.append(Stretch(lane, phase, end - seconds, end, step))
                end -= seconds
            if phase == "eval" and whole > 0:
                share = min(1.0, value("busy/sampler", row))
                found.append(Stretch("engine", "sample", end - whole, end, step, f"{share:.0%} of the time", share))
        if (waited := value("time/sample", row)) > 0:
            found.append(Stretch("trainer", "wait", end - waited, end, step, "waits for a batch"))
    return found


def binned(stretches: Sequence[Stretch], extent: tuple[float, float], bins: int) -> list[Stretch]:
    """Shares of equal bins, by kind."""
    start, width = extent[0], max(extent[1] - extent[0], 1e-9) / bins
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    for one in stretches:
        first = max(0, int((one.start - start) / width))
        last = min(bins - 1, int((one.end - start) / width))
        for place in range(first, last + 1):
            left = max(one.start, start + place * width)
            seconds[place, one.kind] += one.share * max(0.0, min(one.end, start + (place + 1) * width) - left)
    lane = stretches[0].lane
    return [
        Stretch(lane, kind, start + place * width, start + (place + 1) * width, share=min(1.0, amount / width))
        for (place, kind), amount in sorted(seconds.items())
        if amount > 0
    ]


def _within(one: Stretch, start: float | None, end: float | None) -> bool:
    return (start is None or one.end >= start) and (end is None or one.start <= end)


def _place(lane: str) -> tuple[int, str]:
    return next((place for place, known in enumerate(ORDER) if lane.startswith(known)), len(ORDER)), lane
