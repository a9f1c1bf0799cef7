"""The runs of a folder, by names that cannot lead out of it."""

import contextlib
import threading
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.record import RunFolder, find_runs
from paceline.ui.answers import refuse
from paceline.ui.opened import Opened, signature
from paceline.ui.vitals import vitals

SAYING = ("metrics.jsonl", "events.jsonl", "config.toml", "run.lock")
"""Files that say how a run is."""


class Runs:
    """Looks anew at each request: runs come and go while the page is open.

    A name is looked up among those that were found, never joined to a path, so no name reaches another folder. A link
    that leads out of the folder is no run of it either.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._open: dict[Path, RunFolder] = {}
        self._told: dict[Path, tuple[list[Any], bool, dict[str, Any]]] = {}
        self._lock, self._telling = threading.Lock(), threading.Lock()

    def names(self) -> dict[str, Path]:
        """Every run by its name. A folder that is a run itself holds that one alone."""
        return {path.name: path for path in find_runs(self.folder) if path.resolve().is_relative_to(self.folder)}

    def open(self, name: str) -> RunFolder:
        """The run of this name, or a refusal that says what to do."""
        path = self.names().get(name)
        if path is None:
            raise refuse(404, f"there is no run `{name}` in {self.folder}: go back to the list of runs")
        return self.at(path)

    def at(self, path: Path) -> RunFolder:
        """The open run at a path that `names` gave; one object each, so that what was read once is kept."""
        with self._lock:
            if path not in self._open:
                self._open[path] = Opened(path)
            return self._open[path]

    def vitals(self, patient: bool) -> dict[str, dict[str, Any]]:
        """Every run in a line, by its name. Only what may have changed is read again: files that did, and a run that
        lives, since a process dies without writing. Who is not patient gets what can be told at once."""
        if not patient:
            return {name: self._vitals(name, path, False) for name, path in self.names().items()}
        with self._telling:
            return {name: self._vitals(name, path, True) for name, path in self.names().items()}

    def read_ahead(self) -> None:
        """What takes long the first time, of the newest run, before anybody asks for it."""
        with contextlib.suppress(OSError, PacelineError):
            for path in list(self.names().values())[:1]:
                self.at(path).problems()

    def _vitals(self, name: str, path: Path, patient: bool) -> dict[str, Any]:
        files = [signature(path / file) for file in SAYING]
        before, whole, told = self._told.get(path, ([], False, {}))
        if files != before or told["alive"] or (patient and not whole):
            told = vitals(name, self.at(path), patient)
            self._told[path] = files, patient, told
        return told
