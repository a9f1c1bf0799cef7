"""Opens rows by URI.

    rows.jsonl  .json  .csv  .parquet  .arrow      a local file
    train@openai/gsm8k                             a split of a dataset of the hub
    reasoning-gym:chain_sum?size=100&seed=7        a scheme that an upper layer has registered

Whatever the source, what comes back is one kind of sequence: every row was checked when it was opened, is read when it
is asked for, and belongs to the reader.
"""

import codecs
import copy
import importlib
import os
import re
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qsl

from paceline.data import rows as parsing
from paceline.data.rows import BadRow, BadRows, DataError, PlacedRows, Row, Rows, RowShape, wrap_read_errors
from paceline.util.hub_retry import passing_trouble, retry_hub
from paceline.util.importing import FROM_PYTHON


class StoredRows(Rows):
    """Rows as they are stored, shaped into ours on the way out. Bad ones are left out, and counted in `bad`."""

    def __init__(self, shape: RowShape, placed: PlacedRows, limit: int | None = None) -> None:
        """Check the rows in order, until `limit` of them are good."""
        self._shape = shape
        self.bad = BadRows(DataError)
        for place, row in placed:
            self.bad.check(partial(shape, row), BadRow, f"{place}: ")
            if self.bad.seen - len(self.bad) == limit:
                break
        self.bad.settle()
        numbers = range(self.bad.seen)
        self._used = array("Q", (n for n in numbers if n not in self.bad.indices)) if self.bad else numbers

    def __len__(self) -> int:
        return len(self._used)

    def _row(self, index: int) -> Row:
        return self._shape(self._stored(self.stored_number(index)))

    def stored_number(self, index: int) -> int:
        """The number of a row, counted with the bad ones."""
        return self._used[index]

    @abstractmethod
    def _stored(self, number: int) -> Row:
        """The row at a number, counted with the bad ones; the caller may change it."""


class ListRows(StoredRows):
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
        self._source, self._path = source, Path(source).absolute()
        self._offsets = array("Q")
        with wrap_read_errors(source), self._path.open("rb") as lines:
            self._stamp = _stamp(lines)
            super().__init__(shape, self._parse(lines), limit)

    def _parse(self, lines: BinaryIO) -> PlacedRows:
        at = 0
        for number, line in enumerate(lines, start=1):
            if line.removeprefix(codecs.BOM_UTF8).strip():
                self._offsets.append(at)
                yield (place := f"{self._source}:{number}"), _line(line, place)
            at += len(line)

    def _stored(self, number: int) -> Row:
        # Opened anew for each row: no position to share between threads, and nothing to close.
        with wrap_read_errors(self._source), self._path.open("rb") as lines:
            if _stamp(lines) != self._stamp:
                raise DataError(f"dataset {self._source}: the file changed while it was in use; start again")
            lines.seek(self._offsets[number])
            return _line(lines.readline(), self._source)


def _stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _line(line: bytes, place: str) -> Row:
    try:
        return parsing.parse_object(line.decode("utf-8").removeprefix("\ufeff"), place)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not valid UTF-8: {error.reason}") from error


def _in_memory(parse: Callable[[Path], PlacedRows], source: str, shape: RowShape, limit: int | None) -> ListRows:
    with wrap_read_errors(source):
        placed = list(islice(parse(Path(source)), limit))
    return ListRows([row for _, row in placed], [place for place, _ in placed], shape, None)


CACHE_BYTES = 256 * 2**20
"""Decoded groups kept, so that rows in shuffled order do not decode a group each."""
CHUNK = 1024
"""Rows that are Python objects at once while a table is checked."""

Table = Any  # a `pyarrow.Table`
Groups = tuple[Sequence[int], Callable[[int], Table]]
"""How many rows each group has, and how to decode one."""


class ColumnRows(StoredRows):
    """The rows of a table, parquet or arrow: a group of rows is decoded when one of them is asked for."""

    def __init__(self, groups: Callable[[str], Groups], source: str, shape: RowShape, limit: int | None) -> None:
        self._source = source
        sizes, self._decode = groups(source)
        self._ends = list(accumulate(sizes))
        self._decoded: OrderedDict[int, Table] = OrderedDict()
        chunks = (c for group in range(len(self._ends)) for c in self._group(group).to_batches(max_chunksize=CHUNK))
        rows = enumerate((row for chunk in chunks for row in chunk.to_pylist()), start=1)
        super().__init__(shape, islice(((f"{source}, row {number}", row) for number, row in rows), limit))

    def _stored(self, number: int) -> Row:
        group = bisect_right(self._ends, number)
        start = self._ends[group - 1] if group else 0
        return self._group(group).slice(number - start, 1).to_pylist()[0]

    def _group(self, group: int) -> Table:
        if group not in self._decoded:
            with _wrap_arrow_errors(self._source):
                self._decoded[group] = self._decode(group)
            while len(self._decoded) > 1 and sum(table.nbytes for table in self._decoded.values()) > CACHE_BYTES:
                self._decoded.popitem(last=False)
        self._decoded.move_to_end(group)
        return self._decoded[group]


def parquet_groups(source: str) -> Groups:
    arrow, path = _pyarrow(source), Path(source).absolute()

    def decode(group: int) -> Table:
        with arrow.parquet.ParquetFile(path) as file:
            return file.read_row_group(group)

    with _wrap_arrow_errors(source), arrow.parquet.ParquetFile(source) as file:
        return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)], decode


def arrow_groups(source: str) -> Groups:
    """The record batches of an .arrow file, in the file format or the stream format that `datasets` writes. The file is
    mapped, so batches cost no memory unless they are compressed."""
    arrow = _pyarrow(source)
    with _wrap_arrow_errors(source):
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
    for module in ("pyarrow.ipc", "pyarrow.parquet"):
        _import(module, f"dataset {source}: .parquet and .arrow files need pyarrow")
    return importlib.import_module("pyarrow")


def _import(module: str, need: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f'{need}: pip install "paceline[data]"') from error


@contextmanager
def _wrap_arrow_errors(source: str) -> Generator[None]:
    try:
        with wrap_read_errors(source):
            yield
    except _pyarrow(source).ArrowException as error:
        raise DataError(f"dataset {source}: cannot be read: {str(error).splitlines()[0]}") from error


FORMATS: dict[str, Callable[[str, RowShape, int | None], StoredRows]] = {
    ".json": partial(_in_memory, parsing.json_rows),
    ".jsonl": JsonLines,
    ".csv": partial(_in_memory, parsing.csv_rows),
    ".parquet": partial(ColumnRows, parquet_groups),
    ".arrow": partial(ColumnRows, arrow_groups),
}


def hub_name(uri: str) -> str | None:
    """The dataset a URI names on the hub (or the folder it names instead); None for files and schemes."""
    if "@" not in uri.partition("?")[0] or Path(uri).exists():
        return None
    return uri.partition("@")[2].partition(":")[0]


def open_hub(uri: str, shape: RowShape, limit: int | None) -> ListRows:
    """The rows of one split. `datasets` keeps them on disk and maps them; a folder works like a hub name."""
    split, _, place = uri.partition("@")
    name, _, config = place.partition(":")
    if not split or not name:
        raise DataError(f"dataset {uri}: write `split@owner/name`, train@openai/gsm8k say")
    datasets = _import("datasets", f"dataset {uri}: datasets of the hub need the datasets package")
    try:
        rows = retry_hub(f"dataset {uri}", lambda: datasets.load_dataset(name, config or None, split=split))
    # All it raises of its own: a missing name, split or config, no network, files it cannot parse.
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = passing_trouble(error) or (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(
            f"dataset {uri}: cannot be loaded: {reason}; without a network, name a local file instead"
        ) from error
    return ListRows(rows, f"dataset {uri}", shape, limit)


_SCHEME = re.compile(r"([a-z][a-z0-9+-]+):(?!//)([^?]*)(?:\?(.*))?")


@dataclass(frozen=True, slots=True)
class DatasetUri:
    """A URI of a scheme, taken apart: `reasoning-gym:chain_sum?size=100`."""

    uri: str
    scheme: str
    name: str
    options: Mapping[str, str]

    def integer(self, option: str, default: int | None = None, least: int = 1) -> int | None:
        text = self.options.get(option)
        if text is None:
            return default
        if not re.fullmatch(r"-?\d+", text) or int(text) < least:
            raise DataError(f"dataset {self.uri}: `{option}` must be a whole number from {least}, not `{text}`")
        return int(text)

    def limit(self) -> int | None:
        """How many rows are wanted at most; None for all, which may be written -1."""
        return None if self.options.get("limit") == "-1" else self.integer("limit")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the rows of a scheme are made, and the options it knows besides `limit`, which all have."""

    open: Callable[[DatasetUri], Sequence[Row]]
    options: Sequence[str] = ()


_SCHEMES: dict[str, Scheme] = {}


def register_scheme(
    name: str, open_address: Callable[[DatasetUri], Sequence[Row]], options: Sequence[str] = ()
) -> None:
    """Let URIs begin with `name:`. Called by the layers above, which know where such rows come from."""
    _SCHEMES[name] = Scheme(open_address, options)


def parse_address(uri: str) -> DatasetUri | None:
    """The parts of a URI that begins with a scheme; None for files and hub names."""
    if "@" in uri.partition("?")[0] or (found := _SCHEME.fullmatch(uri)) is None:
        return None
    scheme, name, query = found.groups()
    return DatasetUri(uri, scheme, name, dict(parse_qsl(query or "", keep_blank_values=True)))


def open_rows(
    uri: str,
    fields: Mapping[str, str] | None = None,
    limit: int | None = None,
    *,
    demonstrations: bool = False,
    require: Sequence[str] = (),
    prompted: bool = True,
    refine: Callable[[Row], Row] | None = None,
    schemes: Mapping[str, Scheme] | None = None,
) -> Sequence[Row]:
    """The rows behind a URI, all of them checked; the first `limit` if given.

    `fields` maps the source's names to ours, `{"gt_answer": "answer"}`; `require` names what no row may lack;
    `prompted=False` takes rows without a prompt too; `refine` makes of each row what its reader wants, or raises
    `BadRow`; `schemes` holds for this call and comes before those registered.
    """
    shape = RowShape(fields or {}, demonstrations, tuple(require), prompted, refine)
    if limit is not None and limit < 1:
        raise DataError(f"dataset {uri}: the limit must be at least 1, not {limit}")
    rows = _open(uri, shape, limit, {**_SCHEMES, **(schemes or {})})
    if not len(rows):
        raise DataError(f"dataset {uri}: holds no rows")
    return rows


def listed_rows(
    rows: Sequence[Row],
    name: str,
    fields: Mapping[str, str] | None = None,
    *,
    prompted: bool = True,
    refine: Callable[[Row], Row] | None = None,
) -> Sequence[Row]:
    """Rows that the caller holds, a list or a `datasets.Dataset`, checked and shaped like those of a file."""
    if isinstance(rows, Mapping):
        raise DataError(f"{name} is a dict of {', '.join(map(str, rows))}: choose one of them, or give a list of dicts")
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise DataError(f"{name} is of type {type(rows).__name__}: give a list of dicts, a datasets.Dataset or a path")
    if not len(rows):
        raise DataError(f"{name} holds no rows")
    for number, row in enumerate(rows if isinstance(rows, list) else islice(rows, 1), start=1):
        if not isinstance(row, Mapping):
            raise DataError(f"{name}, row {number} is {row!r:.80}: give a list of dicts, one for each row")
    return ListRows(rows, name, RowShape(fields or {}, prompted=prompted, refine=refine), None)


def _open(uri: str, shape: RowShape, limit: int | None, schemes: Mapping[str, Scheme]) -> StoredRows:
    path, names = Path(uri), ", ".join(f"`{name}:`" for name in sorted(schemes)) or "none"
    if path.suffix in FORMATS and ("@" not in uri or path.exists()):
        return FORMATS[path.suffix](uri, shape, limit)
    if (address := parse_address(uri)) is None:
        if "@" in uri:
            return open_hub(uri, shape, limit)
        raise DataError(f"dataset {uri}: not a {', '.join(FORMATS)} file, nor `split@owner/name`; schemes: {names}")
    scheme = schemes.get(address.scheme)
    if address.scheme == FROM_PYTHON:
        raise DataError(
            f"dataset {uri} stands for rows that were given to paceline.train: call it again with the same arguments "
            'and resume="latest", or name a file of the rows'
        )
    if scheme is None:
        raise DataError(f"dataset {uri}: there is no scheme `{address.scheme}:`; schemes: {names}")
    if unknown := sorted(address.options.keys() - {"limit", *scheme.options}):
        known = ", ".join(f"`{option}`" for option in ("limit", *scheme.options))
        raise DataError(f"dataset {uri}: there is no option `{unknown[0]}`; `{address.scheme}:` knows {known}")
    limits = [n for n in (limit, address.limit()) if n is not None]
    return ListRows(scheme.open(address), f"dataset {uri}", shape, min(limits, default=None))
