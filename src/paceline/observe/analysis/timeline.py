"""Computes the lanes of a run over time: engine, environments, trainer, publish and evaluation.

A long run has more spans than a screen has pixels. Those of a crowded lane are put into bins: for each kind of work the
share of the bin it took, which the page draws as height. Zoomed in, the spans themselves come.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.observe.monitor.text import format_amount
from paceline.observe.record import RunFolder, TimelineSpan

Columns = Mapping[str, Sequence[float | None]]

PHASES = {"eval": "evaluation", "publish": "publish", "train": "trainer", "score": "trainer"}
"""The parts of a step, last first, and whose lane they stand in. Before them the trainer waits for its batch."""
CALLS = ("sandbox", "grader", "judge", "user code")
"""What episodes wait for besides the engine, as `util.episode_spans` has it."""
PAGE_ORDER = ("engine", "environment", *CALLS, "trainer", "publish", "evaluation")
BUSY_ORDER = ("engine", "trainer", "publish", "environment", *CALLS, "evaluation")
COUNTED = {"playing": "episode", "calls": "call"}
"""Kinds of spans whose value is a number, and of what."""


def lanes(run: RunFolder, start: float | None, end: float | None, bins: int) -> dict[str, Any]:
    """The lanes between two times, each with at most a few spans a bin."""
    spans, source = spans_from_record(run.lanes(start, end)), "record"
    if not spans:
        first, last = -math.inf if start is None else start, math.inf if end is None else end
        timed = spans_from_metrics(run.metrics())
        spans, source = [span for span in timed if span.end >= first and span.start <= last], "metrics"
    if not spans:
        return {"source": source, "extent": None, "lanes": []}
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    extent, found = (first if start is None else start, last if end is None else end), []
    for lane, mine in sorted(_by_lane(spans).items(), key=lambda item: _lane_rank(item[0], PAGE_ORDER)):
        crowded = len(mine) > 2 * bins
        shown = bin_spans(mine, extent, bins) if crowded else mine
        rows = [[span.start, span.end, span.kind, round(span.value, 4), span.step, span.detail] for span in shown]
        found.append({"lane": lane, "binned": crowded, "spans": rows})
    return {"source": source, "extent": extent, "lanes": found}


def spans_from_record(spans: Sequence[TimelineSpan]) -> list[TimelineSpan]:
    """Recorded spans, each on the lane of who did the work and with its share of that lane as `value`. Environments and
    what episodes wait for have a number, shown as a share of the highest."""
    most: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.kind in COUNTED:
            most[span.lane] = max(most[span.lane], span.value)
    found = []
    for span in spans:
        lane, kind, share, detail = span.lane, span.kind, 1.0, span.detail
        if span.kind in COUNTED:
            share = span.value / (most[span.lane] or 1.0)
            detail = detail or f"{format_amount(round(span.value), COUNTED[kind])} under way"
        elif span.kind == "busy":
            share, detail = span.value, detail or f"{span.value:.0%} of the time"
        elif lane == "run":
            lane, kind = PHASES.get(kind, "trainer"), "wait" if kind == "sample" else kind
        found.append(TimelineSpan(lane, kind, span.start, span.end, span.step, share, detail))
    return found


def spans_from_metrics(columns: Columns) -> list[TimelineSpan]:
    """The phases of a run without recorded lanes, from their durations: one after the other, up to the line's time."""
    found = []

    def value(name: str, row: int) -> float:
        column = columns.get(name)
        return (column[row] if column is not None else None) or 0.0

    for row in range(len(columns.get("time", []))):
        end, step = value("time", row), int(value("step", row))
        if not end:
            continue
        whole = value("time/step", row)
        for phase, lane in PHASES.items():
            seconds = value(f"time/{phase}", row)
            if seconds > 0:
                found.append(TimelineSpan(lane, phase, end - seconds, end, step, 1.0))
                end -= seconds
            if phase == "eval" and whole > 0:
                share = min(1.0, value("busy/sampler", row))
                detail = f"{share:.0%} of the time"
                found.append(TimelineSpan("engine", "sample", end - whole, end, step, share, detail))
        if (waited := value("time/sample", row)) > 0:
            found.append(TimelineSpan("trainer", "wait", end - waited, end, step, 1.0, "waits for a batch"))
    return found


def bin_spans(spans: Sequence[TimelineSpan], extent: tuple[float, float], bins: int) -> list[TimelineSpan]:
    """Shares of equal bins, by kind."""
    start, width = extent[0], max(extent[1] - extent[0], 1e-9) / bins
    edges = [start + place * width for place in range(bins + 1)]
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    for span in spans:
        first = max(0, int((span.start - start) / width))
        last = min(bins - 1, int((span.end - start) / width))
        for place in range(first, last + 1):
            inside = min(span.end, edges[place + 1]) - max(span.start, edges[place])
            seconds[place, span.kind] += span.value * max(0.0, inside)
    return [
        TimelineSpan(spans[0].lane, kind, edges[place], edges[place + 1], None, min(1.0, amount / width))
        for (place, kind), amount in sorted(seconds.items())
        if amount > 0
    ]


LOAD_SECONDS = 60.0
MOST_LINES = 400
"""Steps of a minute whose times are looked at, where nothing else was recorded."""


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """One lane's share of the time, and what more there is to say."""

    lane: str
    share: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RecentLoad:
    """All lanes over the last `seconds` before a step ended; what goes on since then is not written down yet."""

    seconds: float
    lanes: list[LaneLoad]


def recent_load(run: RunFolder, columns: Columns, pace: float | None) -> RecentLoad:
    """The load of a minute, or of a whole step where one takes longer."""
    length = max(LOAD_SECONDS, pace or 0.0)
    end = next((stamp for stamp in reversed(columns["time"]) if stamp is not None), None)
    if end is None:
        return RecentLoad(length, [])
    start = end - length
    recorded = run.lanes(start, end)
    tail = {name: column[-MOST_LINES:] for name, column in columns.items()}
    spans = spans_from_record(recorded) or [span for span in spans_from_metrics(tail) if start <= span.end <= end]
    start = max(start, min((span.start for span in spans), default=start))
    working = [replace(span, value=1.0) if span.kind in COUNTED else span for span in spans if span.kind != "wait"]
    loads = []
    for lane, mine in sorted(_by_lane(working).items(), key=lambda item: _lane_rank(item[0], BUSY_ORDER)):
        share = sum(part.value for part in bin_spans(mine, (start, end), 1))
        loads.append(LaneLoad(lane, min(1.0, share), _counted(recorded, lane, start, end)))
    return RecentLoad(end - start, loads)


def _counted(spans: Sequence[TimelineSpan], lane: str, start: float, end: float) -> str:
    counted = [span for span in spans if span.lane == lane and span.kind in COUNTED]
    if not counted or end <= start:
        return ""
    total = sum(span.value * max(0.0, min(span.end, end) - max(span.start, start)) for span in counted)
    return f"{total / (end - start):.1f} {COUNTED[counted[0].kind]}s at once"


def _by_lane(spans: Sequence[TimelineSpan]) -> dict[str, list[TimelineSpan]]:
    found: dict[str, list[TimelineSpan]] = defaultdict(list)
    for span in spans:
        found[span.lane].append(span)
    return found


def _lane_rank(lane: str, order: Sequence[str]) -> tuple[int, str]:
    return next((place for place, known in enumerate(order) if lane.startswith(known)), len(order)), lane
