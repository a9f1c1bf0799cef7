"""One look at a run: its vital signs, and now and then what costs more."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import RenderableType

from paceline.record import RunFolder
from paceline.record.advice import Advisory, advise, sight_of
from paceline.top.drawing import drawn
from paceline.top.signs import Signs, signs

SELDOM = 10.0
"""Seconds between two looks at all that was recorded."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one look has seen."""

    signs: Signs
    advice: list[Advisory] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def drawn(self, width: int) -> RenderableType:
        return drawn(self.signs, self.advice, self.problems, width)


class Looker:
    """Looks at one run again and again. Files are read on from where the last look ended."""

    def __init__(self, run: RunFolder, clock: Callable[[], float] = time.time) -> None:
        self._run, self._clock = run, clock
        self._whole: tuple[float, list[Advisory], list[str]] | None = None
        self._signs: Signs | None = None

    def look(self) -> Look:
        now = self._clock()
        if self._whole is None or now - self._whole[0] >= SELDOM:
            self._whole = now, advise(sight_of(self._run)), self._run.problems()
        _, advice, problems = self._whole
        self._signs = signs(self._run, now, self._signs)
        return Look(self._signs, advice, problems)
