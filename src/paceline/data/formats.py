"""Opens files of rows: each row is checked once, when the file is opened, and read when asked for."""

import codecs
import copy
import importlib
import os
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO

from paceline.data.rows import (
    BadRow,
    BadRows,
    DataError,
    Placed,
    Row,
    Rows,
    RowShape,
    csv_rows,
    json_rows,
    parse_object,
    reading,
)


class StoredRows(Rows):
    """Rows as they are stored, shaped into ours on the way out. Bad ones are left out, and counted in `bad`."""

    def __init__(self, shape: RowShape, placed: Placed, limit: int | None = None) -> None:
        """Check the rows in order, until `limit` of them are good."""
        self._shape = shape
        self.bad = BadRows(DataError)
        for place, row in placed:
            try:
                shape(row)
            except BadRow as error:
                self.bad.bad(f"{place}: {error}")
            else:
                self.bad.good()
            if self.bad.seen - len(self.bad) == limit:
                break
        self.bad.settle()
        numbers = range(self.bad.seen)
        self._used = array("Q", (n for n in numbers if n not in self.bad.indices)) if self.bad else numbers

    def __len__(self) -> int:
        return len(self._used)

    def _row(self, index: int) -> Row:
        return self._shape(self._stored(self._used[index]))

    @abstractmethod
    def _stored(self, number: int) -> Row:
        """The row at a number, counted with the bad ones; the caller may change it."""


class Listed(StoredRows):
    """Rows that are held elsewhere: a list in memory, a dataset of the hub, a generated task."""

    def __init__(self, rows: Sequence[Row], places: str | Iterable[str], shape: RowShape, limit: int | None) -> None:
        """`places` names the place of each row in an error, or all of them at once."""
        self._rows = rows
        length = len(rows) if limit is None else min(limit, len(rows))
        if isinstance(name := places, str):
            places = (f"{name}, row {number}" for number in range(1, length + 1))
        super().__init__(shape, zip(places, islice(rows, length), strict=False))

    def _stored(self, number: int) -> Row:
        return copy.deepcopy(self._rows[number])


class JsonLines(StoredRows):
    """A .jsonl file by the byte offsets of its rows: eight bytes of memory a row, however long the rows are."""

    def __init__(self, source: str, shape: RowShape, limit: int | None) -> None:
        self._source = source
        self._path = Path(source).absolute()
        self._offsets = array("Q")
        with reading(source), self._path.open("rb") as lines:
            self._stamp = _stamp(lines)
            super().__init__(shape, self._parse(lines), limit)

    def _parse(self, lines: BinaryIO) -> Placed:
        at = 0
        for number, line in enumerate(lines, start=1):
            if line.removeprefix(codecs.BOM_UTF8).strip():
                self._offsets.append(at)
                yield (place := f"{self._source}:{number}"), _line(line, place)
            at += len(line)

    def _stored(self, number: int) -> Row:
        # Opened anew for each row: no position to share between threads, and nothing to close.
        with reading(self._source), self._path.open("rb") as lines:
            if _stamp(lines) != self._stamp:
                raise DataError(f"dataset {self._source}: the file changed while it was in use; start again")
            lines.seek(self._offsets[number])
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
        return Listed([row for _, row in placed], [place for place, _ in placed], shape, None)

    return open_file


CACHE_BYTES = 256 * 2**20
"""Decoded groups kept, so that rows in shuffled order do not decode a group each."""
CHUNK = 1024
"""Rows that are Python objects at once while a table is checked."""

Table = Any
"""A `pyarrow.Table`."""
Groups = tuple[Sequence[int], Callable[[int], Table]]
"""How many rows each group has, and how to decode one."""


class ColumnRows(StoredRows):
    """The rows of a table, parquet or arrow: a group of rows is decoded when one of them is asked for."""

    def __init__(self, source: str, groups: Groups, shape: RowShape, limit: int | None) -> None:
        self._source = source
        sizes, self._decode = groups
        self._ends = list(accumulate(sizes))
        self._decoded: OrderedDict[int, Table] = OrderedDict()
        rows = ((f"{source}, row {number}", row) for number, row in enumerate(self._scan(), start=1))
        super().__init__(shape, islice(rows, limit))

    def _stored(self, number: int) -> Row:
        group = bisect_right(self._ends, number)
        start = self._ends[group - 1] if group else 0
        return self._group(group).slice(number - start, 1).to_pylist()[0]

    def _scan(self) -> Iterator[Row]:
        for group in range(len(self._ends)):
            for chunk in self._group(group).to_batches(max_chunksize=CHUNK):
                yield from chunk.to_pylist()

    def _group(self, group: int) -> Table:
        if group not in self._decoded:
            with _reading(self._source):
                self._decoded[group] = self._decode(group)
            while len(self._decoded) > 1 and sum(table.nbytes for table in self._decoded.values()) > CACHE_BYTES:
                self._decoded.popitem(last=False)
        self._decoded.move_to_end(group)
        return self._decoded[group]


def parquet_groups(source: str) -> Groups:
    """The row groups of a .parquet file."""
    arrow, path = _pyarrow(source), Path(source).absolute()

    def decode(group: int) -> Table:
        with arrow.parquet.ParquetFile(path) as file:
            return file.read_row_group(group)

    with _reading(source), arrow.parquet.ParquetFile(source) as file:
        return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)], decode


def arrow_groups(source: str) -> Groups:
    """The record batches of an .arrow file, in the file format or the stream format that `datasets` writes. The file is
    mapped, so batches cost no memory unless they are compressed."""
    arrow = _pyarrow(source)
    with _reading(source):
        mapped = arrow.memory_map(source)
        try:
            file = arrow.ipc.open_file(mapped)
        except arrow.ArrowInvalid:
            mapped.seek(0)
            batches = list(arrow.ipc.open_stream(mapped))
            return [batch.num_rows for batch in batches], lambda group: arrow.Table.from_batches([batches[group]])
        sizes = [file.get_batch(group).num_rows for group in range(file.num_record_batches)]
        return sizes, lambda group: arrow.Table.from_batches([file.get_batch(group)])


def _pyarrow(source: str) -> Any:
    try:
        for module in ("pyarrow.ipc", "pyarrow.parquet"):
            importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f'dataset {source}: .parquet and .arrow files need pyarrow: pip install "paceline[data]"'
        ) from error
    return importlib.import_module("pyarrow")


@contextmanager
def _reading(source: str) -> Generator[None]:
    """As `reading`, and what pyarrow objects to."""
    try:
        with reading(source):
            yield
    except _pyarrow(source).ArrowException as error:
        raise DataError(f"dataset {source}: cannot be read: {str(error).splitlines()[0]}") from error


Opener = Callable[[str, RowShape, int | None], StoredRows]


def _columns(groups: Callable[[str], Groups]) -> Opener:
    return lambda source, shape, limit: ColumnRows(source, groups(source), shape, limit)


FORMATS: dict[str, Opener] = {
    ".json": _in_memory(json_rows),
    ".jsonl": JsonLines,
    ".csv": _in_memory(csv_rows),
    ".parquet": _columns(parquet_groups),
    ".arrow": _columns(arrow_groups),
}
