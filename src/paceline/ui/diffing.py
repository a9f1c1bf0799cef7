"""Two runs being compared, in a thread: large ones take seconds, and pages ask again how far it is."""

import threading
import time
from collections import Counter
from itertools import count
from typing import Any

from paceline.record import Gone, RunFolder
from paceline.record.parting import compare
from paceline.ui.answers import refuse
from paceline.ui.diff_sides import told

PATIENCE_SECONDS = 20.0
"""Whoever has not asked for so long has left, and the work is given up."""
MOST = 16
"""Comparisons that are remembered."""
AT_ONCE = 2


class Left(Exception):
    """Nobody waits for it any more."""


class Watched(Counter[str]):
    """Counts what was compared, and ends the work when nobody asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = time.monotonic()

    def __setitem__(self, key: str, value: int) -> None:
        if time.monotonic() - self.asked > PATIENCE_SECONDS:
            raise Left
        super().__setitem__(key, value)


class Comparing:
    """One comparison: `working` until it is `done` or `failed`."""

    def __init__(self, one: RunFolder, other: RunFolder, tolerance: float, turns: threading.Semaphore) -> None:
        self._runs, self._tolerance, self._turns = (one, other), tolerance, turns
        self._seen = Watched()
        self._answer: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._work, name="paceline-diff", daemon=True)
        self._thread.start()

    def standing(self, wait: float) -> dict[str, Any]:
        """The answer, or after so many seconds how far it is."""
        self._seen.asked = time.monotonic()
        self._thread.join(wait)
        if self._answer:
            return self._answer
        steps = [int(max((s for s in run.metrics()["step"] if s is not None), default=0)) for run in self._runs]
        done = {name: dict.get(self._seen, name, 0) for name in ("steps", "rollouts")}
        return {"state": "working", "total_steps": max(steps), **done}

    def _work(self) -> None:
        one, other = self._runs
        with self._turns:
            try:
                compared = compare(one, other, self._tolerance, self._seen)
                self._answer = {"state": "done", **told(one, other, compared)}
            except Left:
                self._answer = {"state": "failed", "failure": "nobody waited for it: compare again"}
            except (Gone, OSError, ValueError) as error:
                self._answer = {"state": "failed", "failure": f"the runs cannot be compared: {error}"}


class Comparisons:
    """Those of one app, by number."""

    def __init__(self) -> None:
        self._turns = threading.Semaphore(AT_ONCE)
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._known: dict[int, Comparing] = {}

    def begin(self, one: RunFolder, other: RunFolder, tolerance: float) -> int:
        with self._lock:
            number = next(self._numbers)
            self._known[number] = Comparing(one, other, tolerance, self._turns)
            while len(self._known) > MOST:
                self._known.pop(min(self._known))
            return number

    def standing(self, number: int, wait: float) -> dict[str, Any]:
        found = self._known.get(number)
        if found is None:
            raise refuse(404, "this comparison is not known any more: compare again")
        return found.standing(wait) | {"job": number}
