"""Opens rows by URI.

    rows.jsonl  .json  .csv  .parquet  .arrow      a local file
    train@openai/gsm8k                             a split of a dataset of the hub
    reasoning-gym:chain_sum?size=100&seed=7        a scheme that an upper layer has registered

Whatever the source, what comes back is one kind of sequence: every row was checked when it was opened, is read when it
is asked for, and belongs to the reader.
"""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from paceline.data.formats import FORMATS, Listed, StoredRows
from paceline.data.rows import DataError, Row, RowShape
from paceline.util.importing import FROM_PYTHON


def hub_name(uri: str) -> str | None:
    """The dataset a URI names on the hub (or the folder it names instead); None for files and schemes."""
    if "@" not in uri.partition("?")[0] or Path(uri).exists():
        return None
    return uri.partition("@")[2].partition(":")[0]


def open_hub(uri: str, shape: RowShape, limit: int | None) -> Listed:
    """The rows of one split. `datasets` keeps them on disk and maps them; a folder works like a hub name."""
    split, _, place = uri.partition("@")
    name, _, config = place.partition(":")
    if not split or not name:
        raise DataError(f"dataset {uri}: write `split@owner/name`, train@openai/gsm8k say")
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f'dataset {uri}: datasets of the hub need the datasets package: pip install "paceline[data]"'
        ) from error
    try:
        rows = datasets.load_dataset(name, config or None, split=split)
    # All it raises of its own: a missing name, split or config, no network, files it cannot parse.
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(
            f"dataset {uri}: cannot be loaded: {reason}; without a network, name a local file instead"
        ) from error
    return Listed(rows, f"dataset {uri}", shape, limit)


_SCHEME = re.compile(r"([a-z][a-z0-9+-]+):(?!//)([^?]*)(?:\?(.*))?")


@dataclass(frozen=True, slots=True)
class DatasetUri:
    """A URI of a scheme, taken apart: `reasoning-gym:chain_sum?size=100`."""

    uri: str
    scheme: str
    name: str
    """The part before the question mark: a task, a split."""
    options: Mapping[str, str]

    def integer(self, option: str, default: int | None = None, least: int = 1) -> int | None:
        """An option that is a whole number."""
        text = self.options.get(option)
        if text is None:
            return default
        if not re.fullmatch(r"-?\d+", text) or int(text) < least:
            raise DataError(f"dataset {self.uri}: `{option}` must be a whole number from {least}, not `{text}`")
        return int(text)


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
    return Listed(rows, name, RowShape(fields or {}, prompted=prompted, refine=refine), None)


def _open(uri: str, shape: RowShape, limit: int | None, schemes: Mapping[str, Scheme]) -> StoredRows:
    path = Path(uri)
    if path.suffix in FORMATS and ("@" not in uri or path.exists()):
        return FORMATS[path.suffix](uri, shape, limit)
    if (address := parse_address(uri)) is not None:
        return _open_address(address, shape, limit, schemes)
    if "@" in uri:
        return open_hub(uri, shape, limit)
    raise DataError(
        f"dataset {uri}: not a {', '.join(FORMATS)} file, nor `split@owner/name`; schemes: {_known(schemes)}"
    )


def _open_address(address: DatasetUri, shape: RowShape, limit: int | None, schemes: Mapping[str, Scheme]) -> StoredRows:
    uri, scheme = address.uri, schemes.get(address.scheme)
    if address.scheme == FROM_PYTHON:
        raise DataError(
            f"dataset {uri} stands for rows that were given to paceline.train: call it again with the same arguments "
            'and resume="latest", or name a file of the rows'
        )
    if scheme is None:
        raise DataError(f"dataset {uri}: there is no scheme `{address.scheme}:`; schemes: {_known(schemes)}")
    if unknown := sorted(address.options.keys() - {"limit", *scheme.options}):
        known = ", ".join(f"`{option}`" for option in ("limit", *scheme.options))
        raise DataError(f"dataset {uri}: there is no option `{unknown[0]}`; `{address.scheme}:` knows {known}")
    limits = [n for n in (limit, address.integer("limit")) if n is not None]
    return Listed(scheme.open(address), f"dataset {uri}", shape, min(limits, default=None))


def _known(schemes: Mapping[str, Scheme]) -> str:
    return ", ".join(f"`{name}:`" for name in sorted(schemes)) or "none"
