"""How busy engines and environments are, twice a second, as spans of equal value."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from paceline.monitor.base import Gauges

WINDOW = 0.5
LANES = 8
"""With more of them the windows grow: the file must not."""
LEVELS = 16
"""Shares are rounded to so many, or no two windows would ever be equal."""
LONGEST = 10.0
"""Seconds after which a span is written though it goes on, so that whoever watches sees it."""


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
        """What was still going on."""
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
