"""The run directory: its paths, and the lock that gives one process the right to write there.

Files that a crash cannot spoil: appended line by line, or replaced as a whole.
"""

import contextlib
import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType, UnionType
from typing import Any, Self

from paceline.errors import PacelineError

_BLOCK = 1 << 16


def plain(value: Any) -> Any:
    """The value as JSON has it: NaN and infinities become null, arrays lists, anything unknown text."""
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars, without importing numpy
        return plain(value.tolist())
    return str(value)


def append_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append one line a record, in a single write. A write that fails leaves the file as it was."""
    # Lone surrogates cannot be encoded; what backslashreplace makes of them happens to be their JSON escape.
    lines = (json.dumps(plain(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    data = "".join(lines).encode("utf-8", "backslashreplace")
    if not data:
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        before = os.fstat(descriptor).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # what went wrong first is what the user must hear
                os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of an append-only file; none if there is no file yet.

    A line is there once its newline is, so the torn last line of a killed process is skipped.
    """
    return [_record(path, number, line) for number, line in _whole_lines(path)]


def read_sound(path: Path, fields: Mapping[str, type | UnionType]) -> tuple[list[dict[str, Any]], list[str]]:
    """The records that have these fields, and a sentence about the lines that are none: a damaged one is named, and no
    reason to be silent about the rest."""
    found, damaged = [], []
    for number, line in _whole_lines(path):
        record = _json(line)
        if isinstance(record, dict) and all(isinstance(record.get(name), kind) for name, kind in fields.items()):
            found.append(record)
        else:
            damaged.append(number)
    if not damaged:
        return found, []
    many = f"{len(damaged)} lines are" if len(damaged) > 1 else "a line is"
    return found, [f"{path.name}: {many} damaged and left out, the first is line {damaged[0]}"]


def filter_jsonl(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Take out the records for which `keep` is false; the file is replaced at once or not at all. A damaged line stays
    where it is, for its readers to name."""

    def stays(line: bytes) -> bool:
        record = _json(line)
        return keep(record) if isinstance(record, dict) else True

    if not all(stays(line) for _, line in _whole_lines(path)):
        replace_file(path, (line for _, line in _whole_lines(path) if stays(line)))


def drop_torn_line(path: Path) -> None:
    """Cut what follows the last newline, so that the next record starts on a line of its own."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)


def replace_file(path: Path, chunks: Iterable[bytes], durable: bool = True) -> None:
    """Write a whole file; readers see the old content or the new one, never a part.

    What need not survive a power failure, since it is written again in seconds, is not `durable`.
    """
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


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):  # also where a run that begins anew removes it this very moment
        return
    with file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield number, line


def _json(line: bytes) -> Any:
    """What a line holds; None for what is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path}, line {number} is not a JSON object")
    return record


class RunDirectoryError(PacelineError):
    """The run directory cannot be used. The message is one sentence for the user."""


class RunDirectory:
    """The places inside one run's directory. Reading needs no more than this; writing starts with `claim`."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._lock: int | None = None
        self._overwrite = False
        self.begun = False

    @property
    def config_file(self) -> Path:
        return self.root / "config.toml"

    @property
    def metrics_file(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def rollouts_file(self) -> Path:
        return self.root / "rollouts.jsonl"

    @property
    def tickets_file(self) -> Path:
        return self.root / "tickets.jsonl"

    @property
    def events_file(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def batches(self) -> Path:
        return self.root / "batches"

    @property
    def export(self) -> Path:
        return self.root / "export"

    @property
    def plot(self) -> Path:
        return self.root / "rewards.png"

    @property
    def live(self) -> Path:
        """Files that the processes of a running run share: weights in transfer, and each one's log."""
        return self.root / ".live"

    @property
    def lock_file(self) -> Path:
        return self.root / "run.lock"

    @classmethod
    def claim(cls, path: Path, resume: bool = False, overwrite: bool = False) -> Self:
        """Make the directory this process's own, until `release` or the process's end.

        The lock is the kernel's, so it goes with a killed process; its file stays and marks the folder.
        """
        if resume and overwrite:
            raise RunDirectoryError("--resume and --overwrite exclude each other: leave one of them out")
        directory = cls(path)
        try:
            directory._claim(resume, overwrite)
        except OSError as error:
            directory.release()
            reason = error.strerror or str(error)
            raise RunDirectoryError(
                f"cannot use {path} as run directory: {reason}; choose a folder with --runs"
            ) from error
        except RunDirectoryError:
            directory.release()
            raise
        return directory

    def begin(self, config: str) -> None:
        """The run really starts: only now does what it replaces go."""
        if self._overwrite:
            self._clear()
        self.checkpoints.mkdir(exist_ok=True)
        replace_file(self.config_file, [config.encode()])
        self.begun = True

    def release(self) -> None:
        """Let others have the directory; safe to call twice."""
        if self._lock is not None:
            # Unlock by name: a forked child that still holds the descriptor would keep the lock alive.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _claim(self, resume: bool, overwrite: bool) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self._refuse_foreign()
        self._take_lock()
        self._overwrite = overwrite
        if not (resume or overwrite) and (self.config_file.exists() or self.metrics_file.exists()):
            raise RunDirectoryError(
                f"{self.root} already holds a run: add --resume latest to go on, "
                "--name NAME to start another, or --overwrite to replace it"
            )

    def _refuse_foreign(self) -> None:
        """A folder with other people's files is no place to write, and even less one to clear."""
        ours = self.config_file.exists() or self.lock_file.exists()
        if not ours and any(not entry.name.startswith(".") for entry in self.root.iterdir()):
            raise RunDirectoryError(f"{self.root} holds files that are not a run's: choose another --name")

    def _take_lock(self) -> None:
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            who = f"process {holder}" if holder else "another process"
            raise RunDirectoryError(f"{self.root} is in use by {who}: wait for it, or choose another --name") from None
        except OSError:
            os.close(descriptor)
            raise
        self._lock = descriptor
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())

    def _clear(self) -> None:
        for entry in self.root.iterdir():
            if entry in (self.lock_file, self.live):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)  # the watchdog's draft, which has its final name by now
