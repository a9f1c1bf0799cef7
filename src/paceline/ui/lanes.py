"""Bins the work of engine, trainer, publish and environments over time, few enough to draw.

A long run has more spans than a screen has pixels. Those of a crowded lane are put into bins: for each kind of work the
share of the bin it took, which the page draws as height. Zoomed in, the spans themselves come.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.record import RunFolder, TimelineSpan

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
