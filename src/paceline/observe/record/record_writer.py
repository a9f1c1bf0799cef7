"""Appends to the record's files. One process writes them: the one that holds the run's lock.

Rows are never changed. To go back, a tail is cut off: the index is replaced, so that readers who have mapped the old
one keep what they see and notice; only then are text and bodies cut, which no reader maps.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.observe.monitor.directory import append_jsonl, drop_torn_line, read_jsonl, replace_file, write_all
from paceline.observe.record.layout import LANE, NAMED, ROW, SCHEMA, RecordFiles
from paceline.observe.record.rows import escape_surrogates

MOST_NAMES = 60_000
"""Names a row can tell apart, with some room: actors may be called anything, and differently each time."""
_BLOCK = 1 << 22


class RecordWriter:
    """Appends rows with what they point at. A crash in the middle leaves a tail that the next opening cuts off."""

    def __init__(self, run: Path) -> None:
        self._at = at = RecordFiles(run)
        at.folder.mkdir(exist_ok=True)
        if at.schema.exists():
            if (schema := json.loads(at.schema.read_text()).get("schema")) != SCHEMA:
                raise PacelineError(
                    f"{at.folder} was written in schema {schema}, and this version of Paceline writes {SCHEMA}: resume "
                    "with the version that began the run, or move the folder away"
                )
        else:
            replace_file(at.schema, [json.dumps({"schema": SCHEMA}).encode()])
        drop_torn_line(at.names)
        self._names = {(line["kind"], line["name"]): n for n, line in enumerate(read_jsonl(at.names), start=1)}
        self._numbers: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._new: list[dict[str, str]] = []
        self._files = {path: _open_for_append(path) for path in (at.data, at.text, at.index, at.lanes)}
        self._keep_rows(count_complete_rows(self.rows(), *self.ends, len(self._names)))
        self._truncate(at.lanes, self.size(at.lanes) // LANE.itemsize * LANE.itemsize)

    @property
    def ends(self) -> tuple[int, int]:
        """Bytes of bodies and of text so far."""
        return self.size(self._at.data), self.size(self._at.text)

    def rows(self) -> NDArray[Any]:
        """The index, as far as its rows are whole."""
        return map_rows(self._at.index, ROW)

    def name(self, kind: str, name: str) -> int:
        """The number of a name, which is written with the next rows."""
        if not name:
            return 0
        if (number := self._names.get((kind, name))) is None:
            if len(self._names) >= MOST_NAMES and name != "other":
                return self.name(kind, "other")
            self._names[kind, name] = number = len(self._names) + 1
            self._new.append({"kind": kind, "name": escape_surrogates(name)})
        return number

    def numbers(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """The numbers of a row's names, in the order of `NAMED`. Most rows have the names of one before."""
        if (found := self._numbers.get(names)) is None:
            found = tuple(self.name(kind, name) for kind, name in zip(NAMED, names, strict=True))
            if len(self._numbers) < MOST_NAMES:
                self._numbers[names] = found
        return found

    def append(self, rows: Sequence[bytes], data: Sequence[bytes], text: Sequence[bytes]) -> None:
        """Bodies, text and names first, then the rows that point at them."""
        write_all(self._files[self._at.data], b"".join(data))
        write_all(self._files[self._at.text], b"".join(text))
        self._write_names()
        write_all(self._files[self._at.index], b"".join(rows))

    def append_lanes(self, spans: Sequence[bytes]) -> None:
        self._write_names()
        write_all(self._files[self._at.lanes], b"".join(spans))

    def truncate_after(self, step: int) -> None:
        """Take out what came after a step; all of it where the run begins anew, and then the time before it too."""
        if step <= 0:
            self._keep_rows(0)
            self._replace(self._at.lanes, 0)
        else:
            self._keep_rows(int(np.searchsorted(self.rows()["step"], step, side="right")))

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def size(self, path: Path) -> int:
        return os.fstat(self._files[path]).st_size

    def _keep_rows(self, count: int) -> None:
        rows = self.rows()
        if count < len(rows):
            self._replace(self._at.index, count * ROW.itemsize)
        self._truncate(self._at.index, count * ROW.itemsize)
        for path, at in ((self._at.data, ""), (self._at.text, "text_")):
            self._truncate(path, int(rows[f"{at}offset"][count - 1] + rows[f"{at}size"][count - 1]) if count else 0)

    def _replace(self, path: Path, size: int) -> None:
        """The same file, but its first bytes alone, under a new identity."""
        descriptor = self._files[path]

        def blocks() -> Iterator[bytes]:
            for start in range(0, size, _BLOCK):
                yield os.pread(descriptor, min(_BLOCK, size - start), start)

        replace_file(path, blocks(), durable=False)
        os.close(descriptor)
        self._files[path] = _open_for_append(path)

    def _truncate(self, path: Path, size: int) -> None:
        if self.size(path) > size:
            os.ftruncate(self._files[path], size)

    def _write_names(self) -> None:
        if self._new:
            append_jsonl(self._at.names, self._new)
            self._new = []


def count_complete_rows(rows: NDArray[Any], data: int, text: int, names: int) -> int:
    """How many rows from the first on have all that they point at, in files of these sizes."""
    count = int(np.searchsorted(rows["offset"] + rows["size"], data, side="right"))
    count = min(count, int(np.searchsorted(rows["text_offset"] + rows["text_size"], text, side="right")))
    for column in NAMED:
        if count and rows[column][:count].max() > names:
            count = int(np.argmax(rows[column][:count] > names))
    return count


def map_rows(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The whole rows of a file, without reading it."""
    try:
        with path.open("rb") as file:
            count = os.fstat(file.fileno()).st_size // dtype.itemsize
            return np.memmap(file, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)
    except FileNotFoundError:
        return np.empty(0, dtype)


def _open_for_append(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
