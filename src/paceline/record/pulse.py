"""Samples how busy engines and environments are, twice a second, and reads the timeline of a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.monitor.base import Gauges
from paceline.record.layout import LANE, RecordFiles
from paceline.record.lines import Lines
from paceline.record.record_writer import mapped
from paceline.record.stored import strange_schema


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """One span of work on a lane; `start` and `end` in seconds since 1970."""

    lane: str
    kind: str
    start: float
    end: float
    step: int
    value: float
    detail: str = ""


class Lanes:
    """Spans by time."""

    def __init__(self, at: RecordFiles) -> None:
        self._at, self._names = at, Lines(at.names)

    def find(self, start: float | None = None, end: float | None = None) -> list[TimelineSpan]:
        """Spans that touch this time, as they were written: those of one lane in the order of time."""
        if strange_schema(self._at) is not None:
            return []
        rows = mapped(self._at.lanes, LANE)
        names = ["", *(str(line.get("name", "")) for line in self._names.read())]
        fits = np.ones(len(rows), bool)
        for column in ("lane", "kind", "detail"):
            fits &= rows[column] < len(names)
        for column in ("start", "end", "value"):
            fits &= np.isfinite(rows[column])  # a damaged file has times that cannot be drawn
        if start is not None:
            fits &= rows["end"] >= start
        if end is not None:
            fits &= rows["start"] <= end
        return [
            TimelineSpan(names[lane], names[kind], begun, ended, step, value, names[detail])
            for lane, kind, step, begun, ended, value, detail in rows[fits].tolist()
        ]


WINDOW = 0.5
LANES = 8
"""With more of them the windows grow: the file must not."""
LEVELS = 16
"""Shares are rounded to so many, or no two windows would ever be equal."""
LONGEST = 10.0
"""Seconds after which a span is written though it goes on, so that live views show it."""


class Beat(NamedTuple):
    """A span of a lane during which nothing changed. What is idle has none."""

    lane: str
    kind: str
    start: float
    end: float
    value: float


class Pulse:
    """Looks, and answers with the spans that have ended."""

    def __init__(self, look: Gauges) -> None:
        self._look = look
        self._before: dict[str, float] = {}
        self._at: float | None = None
        self._open: dict[tuple[str, str], Beat] = {}
        self._window = WINDOW

    def due(self, now: float) -> float:
        """Seconds until the next look."""
        return 0.0 if self._at is None else max(0.0, self._at + self._window - now)

    def beat(self, now: float) -> list[Beat]:
        busy, playing = self._look()
        since, self._at = self._at, now
        before, self._before = self._before, dict(busy)
        if since is None or now <= since:
            return []
        values = {("environment " + env, "playing"): float(count) for env, count in playing.items()}
        for engine, seconds in busy.items():
            share = (seconds - before.get(engine, seconds)) / (now - since)
            values[engine, "busy"] = round(min(1.0, max(0.0, share)) * LEVELS) / LEVELS
        self._window = WINDOW * max(1, math.ceil(len(values) / LANES))
        return self._joined(values, since, now)

    def end(self) -> list[Beat]:
        """The spans that were still open."""
        beats, self._open = list(self._open.values()), {}
        return beats

    def _joined(self, values: Mapping[tuple[str, str], float], since: float, now: float) -> list[Beat]:
        ended = []
        for key in [*self._open, *(key for key in values if key not in self._open)]:
            value, going = values.get(key, 0.0), self._open.pop(key, None)
            if going is not None and (going.value != value or now - going.start > LONGEST):
                ended.append(going)
                going = None
            if value:
                self._open[key] = Beat(*key, going.start if going else since, now, value)
            elif going is not None:
                ended.append(going)
        return ended
