"""Opens files of rows: each row is checked once, when the file is opened, and read when asked for."""

import codecs
import copy
import os
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from paceline.data.fields import BadRow, RowShape
from paceline.data.rows import BadRows, DataError, Placed, Row, Rows, csv_rows, json_rows, parse_object, reading


class StoredRows(Rows):
    """Rows as they are stored, shaped into ours on the way out. Bad ones are left out, and told of in `bad`."""

    def __init__(self, shape: RowShape) -> None:
        self._shape = shape
        self.bad = BadRows(DataError)

    @abstractmethod
    def _raw(self, index: int) -> Row:
        """The row as it is stored; the caller may change it."""

    def _row(self, index: int) -> Row:
        return self._shape(self._raw(index))

    def _check(self, row: Row, place: str) -> bool:
        """Whether the row can be used."""
        try:
            self._shape(row)
        except BadRow as error:
            self.bad.bad(f"{place}: {error}")
            return False
        self.bad.good()
        return True


class Numbered(StoredRows):
    """Stored rows that are found by their number."""

    def __init__(self, shape: RowShape) -> None:
        super().__init__(shape)
        self._used: Sequence[int] = ()

    def _look_at(self, placed: Iterable[tuple[Row, str]]) -> None:
        """Check all of them, in order."""
        for row, place in placed:
            self._check(row, place)
        self.bad.settle()
        numbers = range(self.bad.seen)
        self._used = array("Q", (n for n in numbers if n not in self.bad.indices)) if self.bad else numbers

    def __len__(self) -> int:
        return len(self._used)

    def _raw(self, index: int) -> Row:
        return self._stored(self._used[index])

    @abstractmethod
    def _stored(self, number: int) -> Row:
        """The row at a number, counted with the bad ones."""


class Listed(Numbered):
    """Rows that are held elsewhere: a list in memory, a dataset of the hub, a generated task."""

    def __init__(self, rows: Sequence[Row], places: Iterable[str], shape: RowShape, limit: int | None) -> None:
        super().__init__(shape)
        self._rows = rows
        length = len(rows) if limit is None else min(limit, len(rows))
        self._look_at(zip(islice(rows, length), places, strict=False))

    def _stored(self, number: int) -> Row:
        return copy.deepcopy(self._rows[number])


class JsonLines(StoredRows):
    """A .jsonl file by the byte offsets of its rows: eight bytes of memory a row, however long the rows are."""

    def __init__(self, source: str, shape: RowShape, limit: int | None) -> None:
        super().__init__(shape)
        self._source = source
        self._path = Path(source).absolute()
        self._offsets = array("Q")
        with reading(source), self._path.open("rb") as lines:
            self._stamp = _stamp(lines)
            self._index(lines, limit)
        self.bad.settle()

    def _index(self, lines: BinaryIO, limit: int | None) -> None:
        at = 0
        for number, line in enumerate(lines, start=1):
            if len(self._offsets) == limit:
                return
            if line.removeprefix(codecs.BOM_UTF8).strip():
                place = f"{self._source}:{number}"
                if self._check(_line(line, place), place):
                    self._offsets.append(at)
            at += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def _raw(self, index: int) -> Row:
        # Opened anew for each row: no position to share between threads, and nothing to close.
        with reading(self._source), self._path.open("rb") as lines:
            if _stamp(lines) != self._stamp:
                raise DataError(f"dataset {self._source}: the file changed while it was in use; start again")
            lines.seek(self._offsets[index])
            return _line(lines.readline(), self._source)


def _stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _line(line: bytes, place: str) -> Row:
    try:
        return parse_object(line.decode("utf-8").removeprefix("\ufeff"), place)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not valid UTF-8: {error.reason}") from error


def _in_memory(parse: Callable[[Path], Placed]) -> "Opener":
    def open_file(source: str, shape: RowShape, limit: int | None) -> Listed:
        with reading(source):
            placed = list(islice(parse(Path(source)), limit))
        return Listed([row for _, row in placed], [place for place, _ in placed], shape, limit)

    return open_file


def _parquet(source: str, shape: RowShape, limit: int | None) -> StoredRows:
    from paceline.data.columns import ColumnRows, parquet_groups

    return ColumnRows(source, parquet_groups(source), shape, limit)


def _arrow(source: str, shape: RowShape, limit: int | None) -> StoredRows:
    from paceline.data.columns import ColumnRows, arrow_groups

    return ColumnRows(source, arrow_groups(source), shape, limit)


Opener = Callable[[str, RowShape, int | None], StoredRows]

FORMATS: dict[str, Opener] = {
    ".json": _in_memory(json_rows),
    ".jsonl": JsonLines,
    ".csv": _in_memory(csv_rows),
    ".parquet": _parquet,
    ".arrow": _arrow,
}
