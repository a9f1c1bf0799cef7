"""Computes how busy each part of a run was recently."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.record import RunFolder, TimelineSpan
from paceline.ui.lanes import Stretch, binned, from_metrics, recorded

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
