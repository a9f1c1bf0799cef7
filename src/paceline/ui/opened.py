"""A run that a page looks at again and again, as it grows."""

import threading
from pathlib import Path

from paceline.monitor.directory import RunDirectory
from paceline.record import Changed, RunFolder
from paceline.record.folder import Columns

Signature = tuple[int, int, int]
"""File, size and time of change; zeros where there is none."""


class Opened(RunFolder):
    """A run folder that keeps its metrics as columns, and adds only the lines that came since.

    What it hands out is never changed afterwards: other threads read it while this one goes on.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(RunDirectory(path))
        self._reading = threading.Lock()
        self._kept: Columns = {}
        self._signature: Signature = (0, 0, 0)
        self._changed: tuple[Signature, list[Changed]] | None = None

    def changed(self) -> list[Changed]:
        now = signature(self.path / "config.toml")
        if self._changed is None or self._changed[0] != now:
            self._changed = now, super().changed()
        return self._changed[1]

    def metrics(self, since: int = 0) -> Columns:
        if since:
            return super().metrics(since)
        with self._reading:
            now = signature(self.path / "metrics.jsonl")
            if now != self._signature or not self._kept:
                steps = self._kept.get("step", [])
                goes_on = steps and now[0] == self._signature[0] and now[1] >= self._signature[1]
                last = int(max(step or 0 for step in steps)) if goes_on else -1
                self._kept = joined(self._kept, super().metrics(last + 1)) if goes_on else super().metrics()
                self._signature = now
            return self._kept


def signature(path: Path) -> Signature:
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


def joined(columns: Columns, more: Columns) -> Columns:
    """One behind the other; a metric that only one of them has is None in the other's lines."""
    before, added = len(columns.get("step", [])), len(more.get("step", []))
    names = dict.fromkeys([*columns, *more])
    return {name: columns.get(name, [None] * before) + more.get(name, [None] * added) for name in names}
