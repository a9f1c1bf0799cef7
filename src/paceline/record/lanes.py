"""What the parts of a run did over time.

    lane `run`                  kinds sample, score, train, publish, eval: the phases of the loop, one after the other
    lane of an engine           kind busy; `value` is the share of the time it computed, in sixteenths
    lane `environment NAME`     kind playing; `value` is how many episodes were under way

What is idle has no span. A run that went back to a checkpoint keeps its lanes: the time was spent.
"""

from dataclasses import dataclass

import numpy as np

from paceline.record.layout import LANE, Places
from paceline.record.lines import Lines
from paceline.record.shelf import mapped
from paceline.record.stored import strange_schema


@dataclass(frozen=True, slots=True)
class Span:
    """Somebody did something, from when to when, in seconds since 1970."""

    lane: str
    kind: str
    start: float
    end: float
    step: int
    value: float
    detail: str = ""


class Lanes:
    """Spans by time."""

    def __init__(self, at: Places) -> None:
        self._at, self._names = at, Lines(at.names)

    def find(self, start: float | None = None, end: float | None = None) -> list[Span]:
        """Spans that touch this time, as they were written: those of one lane in the order of time."""
        if strange_schema(self._at) is not None:
            return []
        rows = mapped(self._at.lanes, LANE)
        names = ["", *(str(line.get("name", "")) for line in self._names.read())]
        fits = np.ones(len(rows), bool)
        for column in ("lane", "kind", "detail"):
            fits &= rows[column] < len(names)
        for column in ("start", "end", "value"):
            fits &= np.isfinite(rows[column])  # a damaged file has times that nobody can draw
        if start is not None:
            fits &= rows["end"] >= start
        if end is not None:
            fits &= rows["start"] <= end
        return [
            Span(names[lane], names[kind], begun, ended, step, value, names[detail])
            for lane, kind, step, begun, ended, value, detail in rows[fits].tolist()
        ]
