"""Reads dataset rows from local files, names and counts bad ones, and computes a digest of all."""

import csv
import json
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, overload

from paceline.errors import PacelineError

FIRST = 20
"""When so many rows from the first on are all bad, the rest is not looked at."""
LEAST, SHARE = 20, 0.01
"""Bad rows are too many from this number on, if they are also more than this share of all; or where they are half."""
NAMED = 3
"""Bad rows that a sentence names."""


class BadRows:
    """The bad rows of one dataset. `kind` is the error to raise over too many."""

    def __init__(self, kind: type[PacelineError] = PacelineError) -> None:
        self._kind = kind
        self.seen = 0
        """Rows looked at, good or bad."""
        self.indices: set[int] = set()
        self.first: list[str] = []
        """A sentence for each of the first: its place, and what is wrong with it."""

    def __len__(self) -> int:
        return len(self.indices)

    def good(self) -> None:
        self.seen += 1

    def bad(self, sentence: str) -> None:
        """Count the next row; raises when none of the first rows is any good."""
        self.indices.add(self.seen)
        self.seen += 1
        if len(self.first) < NAMED:
            self.first.append(sentence)
        if len(self) == self.seen == FIRST:
            self.settle()

    def settle(self) -> None:
        """All were looked at: raises if too many are bad."""
        half = bool(self) and 2 * len(self) >= self.seen
        if half or (len(self) >= LEAST and len(self) > SHARE * self.seen):
            first, *others = self.first
            others = [f"{len(self)} of the first {self.seen} rows are bad", *others] if self.seen > 1 else []
            raise self._kind("; ".join([first, *others]))

    def __str__(self) -> str:
        """The skipped rows, as a sentence; empty where there are none."""
        if not self:
            return ""
        rows = "1 row is" if len(self) == 1 else f"{len(self)} rows are"
        more = "; ..." if len(self) > NAMED else ""
        return f"{rows} skipped, of {self.seen}: {'; '.join(self.first)}{more}"


def look_through(rows: Sequence[object], look: Callable[[int], object], refused: type[PacelineError]) -> BadRows:
    """The rows at which `look` raises the error `refused`; that error again where they are too many."""
    found = BadRows(refused)
    for number in range(len(rows)):
        try:
            look(number)
        except refused as error:
            found.bad(str(error))
        else:
            found.good()
    found.settle()
    return found


Row = dict

Placed = Iterator[tuple[str, Row]]
"""Rows, each with the place to name when it is bad."""

LONGEST_FIELD = 2**31 - 1
"""Of a CSV file, in characters: Python stops at 131,072, and transcripts are longer."""


class DataError(PacelineError):
    """A dataset that cannot be used, as a sentence for the user."""


class Rows(Sequence[Row]):
    """A sequence that makes each row when it is asked for, so that every reader has a row of their own."""

    @abstractmethod
    def _row(self, index: int) -> Row:
        """The row at an index that is known to exist."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(len(self))[index]]
        return self._row(range(len(self))[index])  # a range knows negative indices and where a sequence ends


class RowSubset(Rows):
    """Some rows of a sequence, in their order."""

    def __init__(self, rows: Sequence[Row], indices: Sequence[int]) -> None:
        self.rows = rows
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def _row(self, index: int) -> Row:
        return self.rows[self.indices[index]]


@contextmanager
def reading(source: str) -> Generator[None]:
    """Raise errors of reading a file as `DataError`, a sentence."""
    try:
        yield
    except FileNotFoundError:
        folder = Path(source).parent.resolve().name
        raise DataError(f"dataset {source}: no such file, looked in {folder}/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"dataset {source}: cannot be read: {error}") from error


def json_rows(path: Path) -> Placed:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: must hold a list of objects, not {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", _checked(row, f"{path}, row {number}")


def csv_rows(path: Path) -> Placed:
    with path.open(encoding="utf-8-sig", newline="") as lines:  # spreadsheets write a byte order mark
        csv.field_size_limit(LONGEST_FIELD)
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(f"{path}:{reader.line_num}: a row must have as many fields as the header")
                yield f"{path}:{reader.line_num}", row
        except csv.Error as error:
            raise DataError(f"{path}:{reader.reader.line_num}: not valid CSV: {error}") from error


def parse_object(text: str, place: str) -> Row:
    """The row a line of JSON holds."""
    try:
        return _checked(json.loads(text), place)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or brackets without end
        raise DataError(f"{place}: cannot be read: {error}") from error


def _checked(row: object, place: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{place}: a row must be an object, not {type(row).__name__}")
    return row


MOST_ROWS = 20_000
"""Rows that are hashed. Of more, so many at equal distances; the count and the first and last row always are."""
MOST_FOREIGN = 64
"""Of a sequence that is neither a list nor one of Paceline's readers: what one row costs there is unknown."""
DIGEST_BYTES = 16


def row_digest(rows: Sequence[Row]) -> dict[str, Any]:
    """How many rows there are, how many of them were hashed, and their digest in order.

    >>> row_digest([{"a": 1}, {"a": 2}]) == row_digest([{"a": 2}, {"a": 1}])
    False
    """
    most = MOST_ROWS if isinstance(rows, list | tuple | Rows) else MOST_FOREIGN
    total = len(rows)
    hashed = min(total, most)
    digest = blake2b(digest_size=DIGEST_BYTES)
    for place in range(hashed):
        index = place if hashed == total else place * (total - 1) // (hashed - 1)
        digest.update(_bytes(rows[index]))
    return {"rows": total, "hashed": hashed, "blake2b": digest.hexdigest()}


def row_change(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How the rows of a checkpoint and those of now differ, in a few words; empty if they do not."""
    if saved["rows"] != now["rows"]:
        return f"it had {saved['rows']} rows and has {now['rows']}"
    if saved["hashed"] == now["hashed"] and saved["blake2b"] != now["blake2b"]:
        return f"its {now['rows']} rows have another order or other content"
    return ""


def _bytes(row: Any) -> bytes:
    """A row as text that is the same in every process; of an object that is no JSON only its type counts."""
    try:
        try:
            text = json.dumps(row, sort_keys=True, default=_plain)
        except TypeError:  # keys of several types have no order
            text = json.dumps(row, skipkeys=True, default=_plain)
    except (ValueError, RecursionError):  # a row inside itself
        text = type(row).__name__
    return text.encode("utf-8", "surrogatepass") + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes | bytearray):
        return blake2b(value, digest_size=DIGEST_BYTES).hexdigest()
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__
