"""Opens the runs of a folder by name and caches them, and encodes the answers of routes as JSON."""

import contextlib
import os
import threading
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import orjson
from fastapi import Depends, HTTPException, Query, Request, Response

from paceline.errors import PacelineError
from paceline.observe.analysis.vitals import table_row
from paceline.observe.monitor.directory import RunDirectory
from paceline.observe.record import RunFolder, find_runs

Signature = tuple[int, int, int]
"""File, size and time of change; zeros where there is none."""


def signature(path: Path) -> Signature:
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


STATE_FILES = ("metrics.jsonl", "events.jsonl", "config.toml", "run.lock")
"""Files that determine the state of a run."""
LINKABLE_FOLDERS = ("checkpoints", "export")


class _TableRow(NamedTuple):
    files: list[Signature]
    has_tickets: bool
    row: dict[str, Any]


def outside_link(run: Path) -> str | None:
    """A file or folder of the run that is a link to somewhere else. Checkpoints and exports, of which no page shows a
    file's text, may lie on another disk."""
    with os.scandir(run) as entries:
        links = [entry.name for entry in entries if entry.is_symlink() and entry.name not in LINKABLE_FOLDERS]
    return next((name for name in links if not (run / name).resolve().is_relative_to(run.resolve())), None)


class Runs:
    """The runs of a folder. Every request scans it again, since runs come and go while a page is open.

    A name is looked up among those that were found, never joined to a path, so no name reaches another folder. A link
    that leads out of the folder is no run of it either, nor is a run shown whose own files are such links.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._open: dict[Path, RunFolder] = {}
        self._rows: dict[Path, _TableRow] = {}
        self._lock, self._read_lock = threading.Lock(), threading.Lock()

    def paths(self) -> dict[str, Path]:
        """Every run by its name. A folder that is a run itself holds that one alone."""
        return {path.name: path for path in self._run_paths() if outside_link(path) is None}

    def _run_paths(self) -> list[Path]:
        return [path for path in find_runs(self.folder) if path.resolve().is_relative_to(self.folder)]

    def open(self, name: str) -> RunFolder:
        """The run of this name; raises an HTTPException that says what to do."""
        if (path := self.paths().get(name)) is not None:
            return self.open_path(path)
        links = [outside_link(found) for found in self._run_paths() if found.name == name]
        if link := next(filter(None, links), None):
            raise HTTPException(403, f"`{name}` is not shown: its `{link}` is a link that leads out of the run")
        raise HTTPException(404, f"there is no run `{name}` in {self.folder}: go back to the list of runs")

    def open_path(self, path: Path) -> RunFolder:
        """The open run at a path that `paths` returned; one object per path, which caches what it read."""
        with self._lock:
            if path not in self._open:
                self._open[path] = RunFolder(RunDirectory(path))
            return self._open[path]

    def table(self, patient: bool) -> dict[str, dict[str, Any]]:
        """Every run's row, by its name. Only what may have changed is read again: files that did, and a run that lives,
        since a process dies without writing. Ticket journals are slow to read, so each
        call with `patient` reads one more."""
        paths = self.paths()
        rows = {name: self._row(name, path) for name, path in paths.items()}
        if patient:
            with self._read_lock:
                for name in [name for name, path in paths.items() if not self._rows[path].has_tickets][:1]:
                    rows[name] = self._row(name, paths[name], read=True)
        return rows

    def read_ahead(self) -> None:
        """Fill the caches of the newest run before a page asks for it."""
        with contextlib.suppress(OSError, PacelineError):
            for path in list(self.paths().values())[:1]:
                self.open_path(path).problems()

    def _row(self, name: str, path: Path, read: bool = False) -> dict[str, Any]:
        files = [signature(path / file) for file in STATE_FILES]
        before = self._rows.get(path)
        if before is None or files != before.files or before.row["alive"] or read:
            run, has_tickets = self.open_path(path), read or (before is not None and before.has_tickets)
            row = table_row(name, run, run.problems(patient=read) if has_tickets else run.quick_problems())
            self._rows[path] = before = _TableRow(files, has_tickets, row)
        return before.row


def _runs(request: Request) -> Runs:
    return request.app.state.runs


AllRuns = Annotated[Runs, Depends(_runs)]


def _run(runs: AllRuns, run: Annotated[str, Query(max_length=1000)]) -> RunFolder:
    return runs.open(run)


OneRun = Annotated[RunFolder, Depends(_run)]
"""The run of `?run=NAME`; a sentence and status 404 where there is none. These functions are not `async`, so that
reading a large file holds up a thread and not the server."""


class FiniteJsonResponse(Response):
    """A value as JSON; what is not finite becomes null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def encode_json(content: Any) -> bytes:
    """Text that is no Unicode (a lone surrogate) is shown with replacement characters."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(content, default=str, option=options)
    except TypeError:
        return orjson.dumps(_sanitize(content), default=str, option=options)


def _sanitize(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {_sanitize(key) if isinstance(key, str) else key: _sanitize(item) for key, item in value.items()}
        case list() | tuple():
            return [_sanitize(item) for item in value]
        case int() if abs(value) >= 1 << 63:
            return float(value)
    return _sanitize(asdict(value)) if is_dataclass(value) and not isinstance(value, type) else value
