"""The run directory: its paths and its lock, files that a crash cannot spoil, and the monitor that writes them."""

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, ClassVar, Self

from paceline.errors import PacelineError
from paceline.observe.monitor.base import Monitor, RunOutcome, RunPlan, phase_kind

_ABSENT_ERRORS = (FileNotFoundError, NotADirectoryError)
"""Also where a run that begins anew removes a file this very moment."""


def to_json_value(value: Any) -> Any:
    """The value as JSON has it: NaN and infinities become null, arrays lists, anything unknown text."""
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): to_json_value(item) for key, item in value.items()}
        case list() | tuple():
            return [to_json_value(item) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars, without importing numpy
        return to_json_value(value.tolist())
    return str(value)


def append_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append one line a record, in a single write. A write that fails leaves the file as it was."""
    # Lone surrogates cannot be encoded; what backslashreplace makes of them happens to be their JSON escape.
    lines = (json.dumps(to_json_value(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    data = "".join(lines).encode("utf-8", "backslashreplace")
    if data:
        with path.open("ab", buffering=0) as file:
            write_all(file.fileno(), data)


def write_all(descriptor: int, data: bytes) -> None:
    """Append all of the data; a write that fails leaves the file as it was."""
    before, rest = os.fstat(descriptor).st_size, memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        with contextlib.suppress(OSError):  # what went wrong first is what the user must hear
            os.ftruncate(descriptor, before)
        raise


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of an append-only file; none if there is no file yet. A line is there once its newline is, so the
    torn last line of a killed process is skipped."""
    records = []
    for number, line in enumerate(_whole_lines(path), start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(records[-1], dict):
            raise ValueError(f"{path}, line {number} is not a JSON object")
    return records


def read_valid_jsonl(path: Path, fields: Mapping[str, type | UnionType]) -> tuple[list[dict[str, Any]], list[str]]:
    """The records that have these fields, and a sentence about the lines that are none: a damaged one is named, and no
    reason to be silent about the rest."""
    lines = JsonlReader(path, fields)
    return lines.read(), lines.problems()


class JsonlReader:
    """The JSON objects of an append-only file, read on from where the last reading ended.

    A last line without its end is not there yet. A file that was replaced or cut (the run went back) is read anew. What
    is no JSON object, or lacks one of `fields`, is left out and counted.
    """

    def __init__(self, path: Path, fields: Mapping[str, type | UnionType] | None = None) -> None:
        self.path = path
        self._fields = fields or {}
        self._lock = threading.Lock()
        self._forget()

    def read(self) -> list[dict[str, Any]]:
        """Everything so far; the list is the reader's own."""
        with self._lock:
            self._refresh()
            return list(self._records)

    def problems(self) -> list[str]:
        with self._lock:
            self._refresh()
            return skipped_lines_note(self.path, "damaged", len(self._damaged), *self._damaged[:1])

    def _forget(self) -> None:
        self._identity: tuple[int, int] | None = None
        self._at = 0
        self._records: list[dict[str, Any]] = []
        self._damaged: list[int] = []

    def _refresh(self) -> None:
        try:
            file = self.path.open("rb")
        except _ABSENT_ERRORS:
            self._forget()
            return
        with file:
            status = os.fstat(file.fileno())
            if (status.st_dev, status.st_ino) != self._identity or status.st_size < self._at:
                self._forget()
                self._identity = status.st_dev, status.st_ino
            file.seek(self._at)
            for line in _complete_lines(file):
                self._at += len(line)
                record = _parse_json(line)
                if isinstance(record, dict) and all(isinstance(record.get(k), t) for k, t in self._fields.items()):
                    self._records.append(record)
                else:
                    self._damaged.append(len(self._records) + len(self._damaged) + 1)


def skipped_lines_note(path: Path, why: str, count: int, first: int = 0) -> list[str]:
    """The sentence about lines that were not read, if there are any."""
    many = f"{count} lines are" if count > 1 else "a line is"
    return [f"{path.name}: {many} {why} and left out, the first is line {first}"] if count else []


def filter_jsonl(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Take out the records for which `keep` is false; the file is replaced at once or not at all. A damaged line stays
    where it is, for its readers to name."""

    def stays(line: bytes) -> bool:
        record = _parse_json(line)
        return keep(record) if isinstance(record, dict) else True

    if not all(map(stays, _whole_lines(path))):
        replace_file(path, filter(stays, _whole_lines(path)))


def drop_torn_line(path: Path) -> None:
    """Cut what follows the last newline, so that the next record starts on a line of its own."""
    if path.exists():
        os.truncate(path, sum(map(len, _whole_lines(path))))


def replace_file(path: Path, chunks: Iterable[bytes], durable: bool = True) -> None:
    """Write a whole file; readers see the old content or the new one, never a part. Content that need not survive a
    power failure, since it is written again in seconds, is not `durable`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _whole_lines(path: Path) -> Iterator[bytes]:
    try:
        file = path.open("rb")
    except _ABSENT_ERRORS:
        return
    with file:
        yield from _complete_lines(file)


def _complete_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines from here on that have their end."""
    return takewhile(lambda line: line.endswith(b"\n"), file)


def _parse_json(line: bytes) -> Any:
    """What a line holds; None for what is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class RunDirectory:
    """The places inside one run's directory. Reading needs no more than this; writing starts with `claim`."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.config_file = self.root / "config.toml"
        self.metrics_file = self.root / "metrics.jsonl"
        self.rollouts_file = self.root / "rollouts.jsonl"
        self.tickets_file = self.root / "tickets.jsonl"
        self.events_file = self.root / "events.jsonl"
        self.lock_file = self.root / "run.lock"
        self.checkpoints = self.root / "checkpoints"
        self.batches = self.root / "batches"
        self.export = self.root / "export"
        self.plot = self.root / "rewards.png"
        self.contamination_file = self.root / "contamination.json"
        """Training rows that were left out for what they share with held-out ones."""
        self.live = self.root / ".live"
        """Files that the processes of a running run share: weights in transfer, and each one's log."""
        self._lock: int | None = None
        self._overwrite = False
        self.begun = False

    @classmethod
    def claim(cls, path: Path, resume: bool = False, overwrite: bool = False) -> Self:
        """Make the directory this process's own, until `release` or the process's end. The lock is the kernel's, so it
        goes with a killed process; its file stays and marks the folder."""
        if resume and overwrite:
            raise PacelineError("--resume and --overwrite exclude each other: leave one of them out")
        directory = cls(path)
        try:
            directory._claim(resume, overwrite)
        except (OSError, PacelineError) as error:
            directory.release()
            if isinstance(error, PacelineError):
                raise
            reason = f"{error.strerror or error}; choose a folder with --runs"
            raise PacelineError(f"cannot use {path} as run directory: {reason}") from error
        return directory

    def begin(self, config: str) -> None:
        """The run really starts: only now does what it replaces go."""
        for entry in self.root.iterdir() if self._overwrite else ():
            if entry in (self.lock_file, self.live):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)  # the watchdog's draft, which has its final name by now
        self.checkpoints.mkdir(exist_ok=True)
        replace_file(self.config_file, [config.encode()])
        self.begun = True

    def newest_checkpoint(self) -> Path | None:
        """The folder of the last checkpoint that is whole."""
        return max((path.parent for path in self.checkpoints.glob("step-*/state.json")), default=None)

    def release(self) -> None:
        """Let others have the directory; safe to call twice."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                # Unlock by name: a forked child that still holds the descriptor would keep the lock alive.
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _claim(self, resume: bool, overwrite: bool) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        # A folder with other people's files is no place to write, and even less one to clear.
        ours = self.config_file.exists() or self.lock_file.exists()
        if not ours and any(not entry.name.startswith(".") for entry in self.root.iterdir()):
            raise PacelineError(f"{self.root} holds files that are not a run's: choose another --name")
        self._lock = descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            who = f"process {holder}" if holder else "another process"
            raise PacelineError(f"{self.root} is in use by {who}: wait for it, or choose another --name") from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._overwrite = overwrite
        if not (resume or overwrite) and (self.config_file.exists() or self.metrics_file.exists()):
            raise PacelineError(
                f"{self.root} already holds a run: add --resume latest to go on, "
                "--name NAME to start another, or --overwrite to replace it"
            )


class RunRecorder(Monitor):
    """Writes `metrics.jsonl`, `rollouts.jsonl`, `tickets.jsonl` and `events.jsonl`.

    Nothing is held open or buffered here, so there is nothing to lose and nothing to close. After a roll-back
    the lines of the undone steps go: the checkpoint is the truth, and the files must tell the same story.
    """

    essential: ClassVar[bool] = True

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time, keep_batches: int = 0) -> None:
        self._files = files = RunDirectory(directory)
        self._keep_batches = keep_batches
        self._clock = clock
        self._kind = ""
        for path in (files.metrics_file, files.rollouts_file, files.tickets_file, files.events_file):
            drop_torn_line(path)

    def begin(self, plan: RunPlan) -> None:
        self._rewind(plan.start_step)
        self._event("begin", **_fields(plan, "name", "start_step", "total_steps", "device", "parameters"))

    def phase(self, text: str) -> None:
        if (kind := phase_kind(text)) != self._kind:  # a counter that moves is no event
            self._kind = kind
            self._event("phase", text=re.sub(r"\s*\b\d+/\d+\b", "", text))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        append_jsonl(self._files.metrics_file, [{"step": step, "time": self._clock(), **metrics}])

    def rollouts(self, step: int, records: Sequence[dict[str, Any]]) -> None:
        append_jsonl(self._files.rollouts_file, ({"step": step, **record} for record in records))

    def batch(self, step: int, data: bytes) -> None:
        self._files.batches.mkdir(exist_ok=True)
        replace_file(self._files.batches / f"step-{step:06d}.msgpack", [data])
        for old in sorted(self._files.batches.glob("step-*.msgpack"))[: -self._keep_batches]:
            old.unlink()

    def tickets(self, records: Sequence[dict[str, Any]]) -> None:
        append_jsonl(self._files.tickets_file, records)

    def note(self, text: str) -> None:
        self._event("note", text=text)

    def roll_back(self, step: int) -> None:
        self._rewind(step)
        self._event("roll_back", step=step)

    def end(self, outcome: RunOutcome) -> None:
        traces = {"frames": outcome.frames, "traceback": outcome.trace}
        fields = _fields(outcome, "status", "step", "message", "checkpoint", "export")
        self._event("end", **fields, **{name: trace for name, trace in traces.items() if trace})

    def _event(self, event: str, **fields: Any) -> None:
        append_jsonl(self._files.events_file, [{"time": self._clock(), "event": event, **fields}])

    def _rewind(self, start_step: int) -> None:
        def kept(record: dict[str, Any]) -> bool:
            return _count(record, "step") <= start_step

        def kept_ticket(record: dict[str, Any]) -> bool:
            if "since" in record:  # the checkpoint it came after
                return _count(record, "since") < start_step
            return record.get("state") != "trained" or _count(record, "step") <= start_step

        # A fresh start evaluates the untrained policy again, so not even step 0 of an earlier try stays.
        for path in (self._files.metrics_file, self._files.rollouts_file):
            filter_jsonl(path, kept) if start_step else path.unlink(missing_ok=True)
        filter_jsonl(self._files.tickets_file, kept_ticket)
        for path in self._files.batches.glob("step-*.msgpack"):
            if path.stem > f"step-{start_step:06d}":
                path.unlink()
        for draft in self._files.batches.glob(".step-*.tmp"):  # of one that was killed while it wrote
            draft.unlink(missing_ok=True)


def _fields(source: object, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _count(record: Mapping[str, Any], name: str) -> int:
    """0 where it is missing, or damaged."""
    value = record.get(name)
    return value if isinstance(value, int) else 0
