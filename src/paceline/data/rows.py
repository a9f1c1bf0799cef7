"""Dataset rows from local files. A bad row is an error with file and line."""

import csv
import json
from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import overload

from paceline.errors import PacelineError

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


class Kept(Rows):
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
    """What the disk or its bytes object to, as a sentence."""
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
