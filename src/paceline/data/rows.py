"""Dataset rows from local files. A bad row is an error with file and line."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import PacelineError

Row = dict


class DataError(PacelineError):
    """A dataset that cannot be used, as a sentence for the user."""


def read_rows(source: str) -> list[Row]:
    """All rows of a .jsonl, .json or .csv file."""
    path = Path(source)
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv}
    if path.suffix not in readers:
        raise DataError(f"dataset {source}: only .jsonl, .json and .csv files can be read, not `{path.suffix}`")
    try:
        rows = list(readers[path.suffix](path))
    except FileNotFoundError:
        raise DataError(f"dataset {source}: no such file, looked in {path.parent.resolve().name}/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"dataset {source}: cannot be read: {error}") from error
    if not rows:
        raise DataError(f"dataset {source}: holds no rows")
    return rows


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _object(line, f"{path}:{number}")


def _json(path: Path) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: must hold a list of objects, not {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        yield _checked(row, f"{path}, row {number}")


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:  # spreadsheets write a byte order mark
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(f"{path}:{reader.line_num}: a row must have as many fields as the header")
                yield row
        except csv.Error as error:
            raise DataError(f"{path}:{reader.reader.line_num}: not valid CSV: {error}") from error


def _object(text: str, where: str) -> Row:
    try:
        return _checked(json.loads(text), where)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error.msg}") from error


def _checked(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be an object, not {type(row).__name__}")
    return row
