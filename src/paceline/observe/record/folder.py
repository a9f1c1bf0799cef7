"""Reads a run directory: while the run lives, after it ended, after it crashed, or on another machine."""

import contextlib
import copy
import fcntl
import json
import math
import os
import re
import socket
import threading
import time
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.config import RunConfig
from paceline.data import Sample, WireError, decode
from paceline.data.sample import TokenScores
from paceline.errors import PacelineError
from paceline.observe.monitor.directory import JsonlReader, RunDirectory
from paceline.observe.monitor.watchdog import waits_file
from paceline.observe.record.layout import LANE, SCORES, RecordFiles, map_rows
from paceline.observe.record.rollouts import Rollouts
from paceline.observe.record.tickets import Tickets

State = Literal["starting", "running", "finished", "interrupted", "failed", "crashed"]
_ELSEWHERE_SECONDS = 60.0
"""A run on another machine whose folder is shared counts as alive while its snapshot is not older than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    state: State
    """`crashed`: no process holds its lock, and it did not say how it ended."""
    step: int
    total_steps: int | None
    began: float | None
    """When it was begun or last resumed, in seconds since 1970."""
    ended: float | None
    message: str
    device: str
    parameters: int | None
    alive: bool


def is_alive(run: RunDirectory) -> bool:
    """Whether a process leads this run now, here or on a machine that shares the folder."""
    return _is_locked(run.lock_file) or _is_alive_elsewhere(waits_file(run.root))


def _is_locked(path: Path) -> bool:
    """The kernel's list of locks says so without touching the lock, which would block a process that wants it. Some
    file systems have another device there; then the process in the file must be the one in the list."""
    try:
        status, holder = path.stat(), path.read_text(errors="replace").strip()
    except OSError:
        return False
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    try:
        locks = Path("/proc/locks").read_text()
    except OSError:
        return _is_lock_refused(path)
    held = re.findall(rf"^\d+: FLOCK +\w+ +\w+ +(-?\d+) (\w+:\w+):{status.st_ino} ", locks, re.MULTILINE)
    return any(where == device or process == holder for process, where in held)


def _is_lock_refused(path: Path) -> bool:
    """Where there is no such list: ask for the lock; closing the file gives it back."""
    try:
        file = path.open("rb")
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except OSError:
            return True


def _is_alive_elsewhere(snapshot: Path) -> bool:
    try:
        seen = json.loads(snapshot.read_text())
        elsewhere = seen["host"] != socket.gethostname()
        return elsewhere and time.time() - seen["time"] < _ELSEWHERE_SECONDS
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _as_int(value: Any) -> int | None:
    return value if isinstance(value, int) else None


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """One span of work on a lane; `start` and `end` in seconds since 1970."""

    lane: str
    kind: str
    start: float
    end: float
    step: int | None
    value: float
    detail: str = ""


KeyPath = tuple[str | int, ...]
FILLED_IN_VALUES: dict[KeyPath, Any] = {("model", "dtype"): "float32"}
"""Values that a run writes in place of `auto`, where any machine may choose them."""


@dataclass(frozen=True, slots=True)
class ChangedKey:
    """A key of the run file, its value, and what it would have been."""

    key: str
    value: Any
    default: Any
    """None where there is no default, or where the run cannot do without the key."""


def changed_keys(config: dict[str, Any]) -> list[ChangedKey]:
    """The keys that matter, in the file's order; raises `ValueError` where this Paceline cannot read the config. A key
    matters where the config would be another without it, so nothing that Paceline fills in by itself is listed."""
    resolved = resolved_config(config)
    return [found for key in resolved for found in _changed_below(resolved, (key,))]


def resolved_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config with every key; raises `ValueError` where this Paceline cannot read it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return RunConfig.model_validate(config).model_dump(mode="json", exclude_none=True)
        except ValueError:  # pydantic's ValidationError is one, and says more than concerns a reader
            unknown = "this version of Paceline does not take the config, so its defaults are unknown"
            raise ValueError(unknown) from None


def _changed_below(whole: dict[str, Any], path: KeyPath) -> Iterator[ChangedKey]:
    rest: Any = copy.deepcopy(whole)
    table: Any = reduce(getitem, path[:-1], rest)
    value = table.pop(path[-1])
    without: Any = None
    with contextlib.suppress(ValueError):  # the run cannot do without the key
        without = resolved_config(rest)
    if without == whole or FILLED_IN_VALUES.get(path) == value:
        return
    if isinstance(value, dict) and value:
        for key in value:
            yield from _changed_below(whole, (*path, key))
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for place, item in enumerate(value):
            for key in item:
                yield from _changed_below(whole, (*path, place, key))
    else:
        default = None
        with contextlib.suppress(LookupError, TypeError):
            default = reduce(getitem, path, without)
        yield ChangedKey(key_text(path), value, default)


def key_text(path: KeyPath) -> str:
    """`env[0].algo.type`: a key of the run file as pages and reports name it."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


Columns = dict[str, list[float | None]]


def open_run(path: str | Path) -> "RunFolder":
    """The run at this path; a sentence where there is none."""
    run = RunDirectory(Path(path))
    if not has_run_files(run):
        raise PacelineError(f"there is no run at {path}: name a run directory, such as runs/quickstart")
    return RunFolder(run)


def find_runs(folder: str | Path) -> list[Path]:
    """The run directories in a folder, or the folder itself if it is one; the one that changed last comes first."""
    root = Path(folder)
    if has_run_files(RunDirectory(root)):
        return [root]
    try:
        runs = [path for path in root.iterdir() if path.is_dir() and has_run_files(RunDirectory(path))]
    except OSError as error:
        raise PacelineError(f"{folder} cannot be read: {error.strerror}; name the folder that holds the runs") from None
    return sorted(runs, key=_last_modified, reverse=True)


def has_run_files(run: RunDirectory) -> bool:
    return run.config_file.is_file() or run.lock_file.is_file() or run.metrics_file.is_file()


def _last_modified(path: Path) -> float:
    run = RunDirectory(path)
    for file in (run.metrics_file, run.events_file, run.config_file, run.lock_file):
        with contextlib.suppress(OSError):
            return file.stat().st_mtime
    return 0.0


class RunFolder:
    """Everything a run has written down. Each answer is as of now; whatever cannot be read is among `problems`."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.path = run.root
        self._metrics, self._events = JsonlReader(run.metrics_file), JsonlReader(run.events_file)
        self.rollouts = Rollouts(run)
        self.tickets = Tickets(run)
        self._record = RecordFiles(run.root)
        self._names = JsonlReader(self._record.names)
        self._lock = threading.Lock()
        self._lines: list[dict[str, Any]] = []
        """Lines of the metrics that are among `_columns`."""
        self._columns: Columns = {}
        self._changed: tuple[dict[str, Any], list[ChangedKey]] = {}, []

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def status(self) -> RunStatus:
        """Read from the events, and from whether a process holds the run's lock."""
        living, events = is_alive(self._run), self._events.read()
        marks = [event for event in events if event.get("event") in ("begin", "end")]
        begin = next((event for event in reversed(marks) if event["event"] == "begin"), {})
        end = marks[-1] if marks and marks[-1]["event"] == "end" else {}
        # While a process holds the lock, an end that is not the last word belongs to an earlier life.
        over = end if not living or events[-1:] == [end] else {}
        state: State = ("starting" if end or not begin else "running") if living else "crashed"
        if (how := over.get("status")) in ("finished", "interrupted", "failed"):
            state = how
        return RunStatus(
            state=state,
            step=max(_as_int(line.get("step")) or 0 for line in [*self._metrics.read()[-1:], over]),
            total_steps=_as_int(begin.get("total_steps")),
            began=_number(begin.get("time")),
            ended=_number(over.get("time")),
            message=str(over.get("message") or ""),
            device=str(begin.get("device") or ""),
            parameters=_as_int(begin.get("parameters")),
            alive=living,
        )

    def config(self) -> dict[str, Any]:
        """The resolved run file; empty where there is none yet or it cannot be read."""
        return self._config()[0]

    def changed_keys(self) -> list[ChangedKey]:
        """The keys that differ from the defaults; empty where the config is another version's."""
        config = self.config()
        if config != self._changed[0]:
            found: list[ChangedKey] = []
            with contextlib.suppress(ValueError):
                found = changed_keys(config)
            self._changed = config, found
        return self._changed[1]

    def metrics(self) -> Columns:
        """One list a metric; None where a step does not have it. `step` and `time` are among them. Each call adds only
        the lines that came since, and changes nothing that it handed out: other threads read it meanwhile."""
        with self._lock:
            lines, known = self._metrics.read(), len(self._lines)
            if not (0 < known <= len(lines) and lines[known - 1] is self._lines[-1]):  # nothing yet, or another file
                known, self._columns = 0, {}
            if lines[known:] or not self._columns:
                self._columns = concat_columns(self._columns, columns_of(lines[known:]))
            self._lines = lines
            return self._columns

    def step_metrics(self, step: int) -> dict[str, float]:
        """The metrics of one step, by its last line."""
        columns = self.metrics()
        place = max((place for place, number in enumerate(columns["step"]) if number == step), default=None)
        last = {} if place is None else {name: values[place] for name, values in columns.items()}
        return {name: value for name, value in last.items() if value is not None}

    def events(self, since: int = 0) -> list[dict[str, Any]]:
        """The events, without the first `since`: a caller that asks again continues where the last answer ended."""
        return self._events.read()[since:]

    def batches(self) -> list[int]:
        """Steps whose samples can be read again."""
        files = {int(path.stem[5:]) for path in self._run.batches.glob("step-*.msgpack") if path.stem[5:].isdigit()}
        return sorted(files | set(self.rollouts.steps() if self.rollouts.keeps_all else []))

    def batch(self, step: int) -> list[Sample]:
        """The samples of one step with all their streams, as they shipped; none where they were not kept."""
        path = self._run.batches / f"step-{step:06d}.msgpack"
        if not path.is_file():
            return self.rollouts.batch(step) if self.rollouts.keeps_all else []
        try:
            return decode(path.read_bytes())
        except (OSError, WireError) as error:
            raise PacelineError(f"{path} cannot be read: {error}") from error

    def token_scores(self, step: int, place: int) -> NDArray[Any] | None:
        """What the trainer computed for the trained tokens of a step's sample, in their order (`TOKEN_SCORE`); None
        where it was not recorded."""
        rows = map_rows(self._record.scores, SCORES)
        if (at := int(np.searchsorted(rows["step"], step, side="right")) - 1) < 0 or rows["step"][at] != step:
            return None
        samples, offset, size = (int(rows[at][name]) for name in ("samples", "offset", "size"))
        with contextlib.suppress(OSError, ValueError), self._record.scores_data.open("rb") as file:
            file.seek(offset)
            data = file.read(size)
            return TokenScores(data[: 8 * samples], data[8 * samples :]).by_sample().get(place)
        return None

    def lanes(self, start: float | None = None, end: float | None = None) -> list[TimelineSpan]:
        """The timeline spans that touch this time, in seconds since 1970: those of one lane in the order of time."""
        if self._record.schema_problem() is not None:
            return []
        rows = map_rows(self._record.lanes, LANE)
        names = ["", *(str(line.get("name", "")) for line in self._names.read())]
        low, high = -np.inf if start is None else start, np.inf if end is None else end
        fits = (rows["end"] >= low) & (rows["start"] <= high)
        for column in ("lane", "kind", "detail"):
            fits &= rows[column] < len(names)
        for column in ("start", "end", "value"):
            fits &= np.isfinite(rows[column])  # a damaged file has times that cannot be drawn
        return [
            TimelineSpan(names[lane], names[kind], begun, ended, step, value, names[detail])
            for lane, kind, step, begun, ended, value, detail in rows[fits].tolist()
        ]

    def problems(self, patient: bool = True) -> list[str]:
        """What could not be read, each as a sentence. Without `patient`, a long journal of tickets is left out until
        another call has read it."""
        return [*self.quick_problems(), *self.tickets.problems(patient)]

    def quick_problems(self) -> list[str]:
        """The same without the journal of tickets, which alone takes long to read."""
        config, found = self._config()
        found = [*found, *self._metrics.problems(), *self._events.problems()]
        if not found and config:
            try:
                resolved_config(config)
            except ValueError as error:
                found.append(f"config.toml: {error}")
        return [*found, *self.rollouts.problems()]

    def _config(self) -> tuple[dict[str, Any], list[str]]:
        try:
            return tomllib.loads(self._run.config_file.read_text(encoding="utf-8")), []
        except FileNotFoundError:
            return {}, []
        except (OSError, ValueError) as error:
            return {}, [f"config.toml cannot be read: {error}"]


def columns_of(lines: Sequence[dict[str, Any]]) -> Columns:
    """One list a metric, with a place for each line."""
    names = dict.fromkeys(["step", "time", *(name for line in lines for name in line)])
    return {name: [_number(line.get(name)) for line in lines] for name in names}


def concat_columns(columns: Columns, more: Columns) -> Columns:
    """Append columns; a metric that only one side has is None in the lines of the other."""
    before, added = len(columns.get("step", [])), len(more["step"])
    names = dict.fromkeys([*columns, *more])
    return {name: columns.get(name, [None] * before) + more.get(name, [None] * added) for name in names}


def _number(value: Any) -> float | None:
    """A figure; None for what is none. Python's JSON has `NaN`, `1e999` and integers of any length."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
