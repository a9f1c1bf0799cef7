"""Tables of rows, parquet and arrow: a group of rows is decoded when one of them is asked for."""

import importlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from paceline.data.fields import RowShape
from paceline.data.formats import Numbered
from paceline.data.rows import DataError, Row, reading

CACHE_BYTES = 256 * 2**20
"""Decoded groups kept, so that rows in shuffled order do not decode a group each."""
CHUNK = 1024
"""Rows that are Python objects at once while a table is checked."""

Table = Any
"""A `pyarrow.Table`."""
Groups = tuple[Sequence[int], Callable[[int], Table]]
"""How many rows each group has, and how to decode one."""


class ColumnRows(Numbered):
    """The rows of a table."""

    def __init__(self, source: str, groups: Groups, shape: RowShape, limit: int | None) -> None:
        super().__init__(shape)
        self._source = source
        sizes, self._decode = groups
        self._ends = list(accumulate(sizes))
        self._length = self._ends[-1] if self._ends else 0
        if limit is not None:
            self._length = min(limit, self._length)
        self._decoded: OrderedDict[int, Table] = OrderedDict()
        self._look_at((row, f"{source}, row {number}") for number, row in self._scan())

    def _stored(self, number: int) -> Row:
        group = bisect_right(self._ends, number)
        start = self._ends[group - 1] if group else 0
        return self._group(group).slice(number - start, 1).to_pylist()[0]

    def _scan(self) -> Iterator[tuple[int, Row]]:
        """All rows with their numbers, counted from one."""
        number = 0
        for group in range(len(self._ends)):
            if number >= self._length:
                return
            for chunk in self._group(group).to_batches(max_chunksize=CHUNK):
                for row in chunk.slice(0, max(0, self._length - number)).to_pylist():
                    number += 1
                    yield number, row

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
