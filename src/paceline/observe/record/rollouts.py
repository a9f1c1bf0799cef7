"""Queries the rollouts of a run: pages of matching rows, and one rollout with all that was kept.

Each query reads the files as they are now. Readers and the writer need no coordination.
"""

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.data.sample import Sample, Ticket
from paceline.observe.monitor.directory import JsonlReader, RunDirectory
from paceline.observe.record import layout
from paceline.observe.record.body import decode, decode_samples, decode_turns
from paceline.observe.record.layout import ROW, Names, RecordFiles, count_complete_rows, identity, map_rows
from paceline.observe.record.rows import (
    Neighbours,
    Query,
    ResultPage,
    RolloutNotFound,
    Row,
    StoredRollout,
    fold,
    has_images,
    message_texts,
    row_of,
)

_BLOCK = 16 << 20


class RecordView:
    """A view of the record that does not change. A reader that finds it stale makes another."""

    def __init__(self, at: RecordFiles, names: JsonlReader, before: "RecordView | None" = None) -> None:
        """With a view from `before`, only what came since is looked at."""
        self._at = at
        self.identity = identity(at.index)
        self._data = self._text = -1
        self._data = _open_or_empty(at.data)
        self._text = _open_or_empty(at.text)
        rows = map_rows(at.index, ROW)
        lines = names.read()
        self.names = ["", *(str(line.get("name", "")) for line in lines)]
        self.kinds = ["", *(str(line.get("kind", "")) for line in lines)]
        sizes = [os.fstat(descriptor).st_size for descriptor in (self._data, self._text)]
        known = len(before.rows) if before is not None and before.identity[:2] == self.identity[:2] else 0
        whole = known + count_complete_rows(rows[known:], *sizes, len(lines))
        self.missing_rows = len(rows) - whole
        """Rows whose bodies, texts or names are not there: a copy that was cut short, or a power failure."""
        self.rows = rows[:whole]

    @property
    def is_fresh(self) -> bool:
        """Whether the run has neither gone back nor begun anew since. The index is replaced before anything it pointed
        at goes, so whatever was read while this holds is what the rows say."""
        return identity(self._at.index)[:2] == self.identity[:2]

    def __del__(self) -> None:
        for descriptor in (self._data, self._text):
            if descriptor >= 0:
                os.close(descriptor)

    def read(self, index: int) -> StoredRollout:
        cells = self.rows[index]
        row = row_of(index, cells, self.names)
        if not cells["flags"] & layout.BODY:
            return StoredRollout(row=row, ticket=Ticket(row.ticket, row.env, 0, 0, row.row), reward=row.reward)
        size = int(cells["size"])
        data = os.pread(self._data, size, int(cells["offset"]))
        if len(data) < size:
            raise RolloutNotFound(f"rollout {index} is no longer whole: rollouts.data was cut")
        try:
            body = decode(data)
            turns = decode_turns(body)
            samples = decode_samples(body, turns)
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            raise RolloutNotFound(f"rollout {index} cannot be read: {error}") from error
        messages = [*(turns[-1].messages or ()), turns[-1].message] if turns else []
        names = "parent", "reward", "metrics", "error", "verdicts", "target", "seconds", "spans"
        facts = {name: getattr(body, name) for name in names}
        return StoredRollout(
            row=row, ticket=Ticket(*body.ticket), messages=messages, turns=turns, samples=samples, **facts
        )

    def metrics_of(self, index: int) -> dict[str, Any]:
        """The environment's own metrics of a rollout, without the rest of it; none where they cannot be read."""
        cells = self.rows[index]
        if not cells["flags"] & layout.BODY:
            return {}
        try:
            return decode(os.pread(self._data, int(cells["size"]), int(cells["offset"]))).metrics
        except (ValueError, OverflowError, OSError):
            return {}

    def filter_by_text(self, needle: bytes, among: NDArray[Any]) -> NDArray[Any]:
        """Of these rows, in rising order, those whose text holds the needle."""
        starts, sizes = self.rows["text_offset"][among], self.rows["text_size"][among]
        found = np.zeros(len(among), bool)
        if len(among):
            start, end = int(starts[0]), int(starts[-1] + sizes[-1])
            # Let the disk read on while we search, unless most of what lies between is not wanted. A text that is not
            # in the machine's memory is searched three times as fast.
            if 4 * int(sizes.sum()) >= end - start and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._text, start, end - start, os.POSIX_FADV_WILLNEED)
        for first, last, start, block in self._blocks(starts, sizes):
            if needle in block:
                begins = (starts[first:last] - start).tolist()
                ends = (starts[first:last] + sizes[first:last] - start).tolist()
                find = block.find
                found[first:last] = [find(needle, a, b) >= 0 for a, b in zip(begins, ends, strict=True)]
        return among[found]

    def _blocks(self, starts: NDArray[Any], sizes: NDArray[Any]) -> Iterator[tuple[int, int, int, bytes]]:
        """The texts of these rows in pieces: from which to which row, where the piece begins, and its bytes. Where rows
        lie far apart only they are read."""
        first, count = 0, len(starts)
        ends = starts + sizes
        while first < count:
            start = int(starts[first])
            last = max(first + 1, int(np.searchsorted(ends, start + _BLOCK, side="right")))
            gaps = np.flatnonzero(starts[first + 1 : last] - ends[first : last - 1] > _BLOCK // 64)
            if len(gaps):
                last = first + 1 + int(gaps[0])
            yield first, last, start, os.pread(self._text, int(ends[last - 1]) - start, start)
            first = last


def _open_or_empty(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return os.open(os.devnull, os.O_RDONLY)


class TextRecordView:
    """Like `RecordView`, from readable lines: conversations, but neither tokens nor samples."""

    is_fresh = True
    missing_rows = 0

    def __init__(self, lines: JsonlReader) -> None:
        self._records = lines.read()
        self.identity = (0, 0, len(self._records))
        names: Names = {}
        rows = np.array([_row(place, record, names) for place, record in enumerate(self._records)], ROW)
        self.rows = rows[np.argsort(rows["step"], kind="stable")]
        self.names, self.kinds = (["", *(key[at] for key in names)] for at in (1, 0))

    def read(self, index: int) -> StoredRollout:
        row = row_of(index, self.rows[index], self.names)
        record = self._records[int(self.rows[index]["offset"])]
        metrics, error = record.get("metrics"), record.get("error")
        return StoredRollout(
            row=row,
            ticket=Ticket(row.ticket, row.env, 0, 0, row.row),
            reward=row.reward,
            metrics=metrics if isinstance(metrics, dict) else {},
            error=None if error is None else str(error),
            messages=_list(record, "messages"),
            verdicts=_list(record, "verdicts"),
            target=str(record.get("target") or ""),
        )

    def metrics_of(self, index: int) -> dict[str, Any]:
        return self.read(index).metrics

    def filter_by_text(self, needle: bytes, among: NDArray[Any]) -> NDArray[Any]:
        records = [self._records[place] for place in self.rows["offset"][among].tolist()]
        texts = ([*message_texts(_list(record, "messages")), str(record.get("error") or "")] for record in records)
        return among[np.array([needle in fold("\n".join(text)) for text in texts], bool)]


def _row(place: int, record: Mapping[str, Any], names: Names) -> tuple[Any, ...]:
    """The row of a readable line, which may hold anything."""
    error, reward, messages = record.get("error"), record.get("reward"), _list(record, "messages")
    versions = [version for version in _list(record, "versions") if isinstance(version, int)]
    facts = layout.Facts(
        *(str(record.get(column) or "") for column in ("env", "actor", "kind")),
        layout.TRAINED if error is None else layout.FAILED,
        str(record.get("finish") or ""),
        "" if error is None else layout.error_kind(str(error), False),
        layout.TRAINING,
        *(_integer(record.get(column)) for column in ("ticket", "row", "member", "tokens")),
        prompt=0,
        turns=int(bool(messages)),
        samples=0,
        version_min=min(versions, default=-1),
        version_max=max(versions, default=-1),
        reward=reward if isinstance(reward, int | float) else math.nan,
        advantage=math.nan,
    )
    flags = layout.BODY | (layout.IMAGES if has_images(messages) else 0)
    return layout.index_row(_integer(record.get("step")), names, facts, flags, place)


def _list(record: Mapping[str, Any], key: str) -> list[Any]:
    return value if isinstance(value := record.get(key), list) else []


def _integer(value: Any) -> int:
    return value if isinstance(value, int) and abs(value) < 2**31 else 0


_OPEN = (None, None)
SORTS = ("step", "reward", "advantage", "tokens", "turns", "ticket", "time")
_TRIES = 5
"""A run that goes back while it is read is read again, at most this many times."""

View = RecordView | TextRecordView
T = TypeVar("T")


class Rollouts:
    """All rollouts of a run, numbered in the order in which their fates became known."""

    def __init__(self, run: RunDirectory) -> None:
        self._at = RecordFiles(run.root)
        self._names = JsonlReader(self._at.names)
        self._sample = JsonlReader(run.rollouts_file)
        self._lock = threading.Lock()
        self._view: View | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether the run keeps every rollout; otherwise these are the few of `rollouts.jsonl`."""
        return self._at.schema_problem() is None and self._at.index.exists()

    def view(self) -> View:
        """The record at this moment. `.rows` is a numpy array of `layout.ROW`, `.names` what its numbers mean."""
        with self._lock:
            if not self.keeps_all:
                self._view = TextRecordView(self._sample)
            elif not isinstance(self._view, RecordView) or self._view.identity != identity(self._at.index):
                before = self._view if isinstance(self._view, RecordView) else None
                self._view = RecordView(self._at, self._names, before)
            return self._view

    @property
    def count(self) -> int:
        return len(self.view().rows)

    def names(self, column: str) -> list[str]:
        """The values a column has had: `env`, `actor`, `kind`, `state`, `finish`, `error`."""
        view = self.view()
        return list(dict.fromkeys(name for name, kind in zip(view.names, view.kinds, strict=True) if kind == column))

    def find(self, query: Query | None = None) -> ResultPage[Row]:
        query = query or Query()
        page = slice(query.offset, None if query.limit is None else query.offset + query.limit)

        def read(view: View) -> ResultPage[Row]:
            ordered = _sorted_indices(view, query)
            return ResultPage(len(ordered), [row_of(at, view.rows[at], view.names) for at in ordered[page].tolist()])

        return self._read(read)

    def neighbours(self, index: int, query: Query | None = None) -> Neighbours | None:
        """Where a rollout stands in the whole list that a query gives, and its neighbours; None if it is not in it."""
        ordered = _sorted_indices(self.view(), query or Query())
        found = np.flatnonzero(ordered == index)
        if not len(found):
            return None
        place = int(found[0])
        before, after = ordered[max(0, place - 1) : place], ordered[place + 1 : place + 2]
        return Neighbours(place, len(ordered), *(int(side[0]) if len(side) else None for side in (before, after)))

    def get(self, index: int) -> StoredRollout:
        """One whole rollout; raises `RolloutNotFound` where no rollout has this number or its body cannot be read."""
        return self._read(lambda view: view.read(_check_index(view, index)))

    def get_or_none(self, index: int) -> StoredRollout | None:
        """The same, but None where it cannot be read, or the run went back since it was found."""
        try:
            return self.get(index)
        except RolloutNotFound:
            return None

    def row(self, index: int) -> Row:
        view = self.view()
        return row_of(_check_index(view, index), view.rows[index], view.names)

    def group_members(self, index: int) -> list[int]:
        """All rollouts of its group: of the same ticket, in the same batch or evaluation."""
        return self._rows_like(index, ("env", "ticket", "domain"))

    def episode(self, index: int) -> list[int]:
        """All seats of its episode."""
        return self._rows_like(index, ("env", "ticket", "domain", "member"))

    def steps(self) -> list[int]:
        """Batches that trained."""
        view = self.view()
        return np.unique(view.rows["step"][_has_trained(view, view.rows)]).tolist()

    def batch(self, step: int) -> list[Sample]:
        """The samples that a step trained on, in the order they shipped in."""
        view = self.view()
        first, last = np.searchsorted(view.rows["step"], [step, step + 1])
        places = first + np.flatnonzero(_has_trained(view, view.rows[first:last]))
        return [sample for at in places for sample in self.get(int(at)).samples]

    def problems(self) -> list[str]:
        strange = self._at.schema_problem()
        if strange is not None:
            return [f"{strange}; until then only the rollouts of rollouts.jsonl are shown", *self._sample.problems()]
        view = self.view()
        found = self._names.problems() if self.keeps_all else self._sample.problems()
        if view.missing_rows:
            found.append(
                f"record/ is cut short: of {view.missing_rows} rollouts the rows are there and the contents are not"
            )
        return found

    def _read(self, read: Callable[[View], T]) -> T:
        """The answer of a view that still holds when it was read."""
        for _ in range(_TRIES):
            view = self.view()
            try:
                found = read(view)
            except RolloutNotFound:
                if view.is_fresh:
                    raise
                continue
            if view.is_fresh:
                return found
        raise RolloutNotFound("the run went back again and again while it was read: ask once more")

    def _rows_like(self, index: int, columns: Sequence[str]) -> list[int]:
        view = self.view()
        row = view.rows[_check_index(view, index)]
        first, last = np.searchsorted(view.rows["step"], [row["step"], row["step"] + 1])
        block = view.rows[first:last]
        return (first + np.flatnonzero(np.all([block[name] == row[name] for name in columns], axis=0))).tolist()


def _has_trained(view: View, rows: NDArray[Any]) -> NDArray[Any]:
    return np.isin(rows["state"], _numbers(view, "state", [layout.TRAINED, layout.REPLAYED, layout.SKIPPED]))


def _check_index(view: View, index: int) -> int:
    if not 0 <= index < len(view.rows):
        raise RolloutNotFound(f"there is no rollout {index}: the run has {len(view.rows)}")
    return index


def _sorted_indices(view: View, query: Query) -> NDArray[Any]:
    """All that is asked for, in its order."""
    indices = _matching_indices(view, query)
    if query.text:
        indices = view.filter_by_text(fold(query.text), indices)
    column, down = query.sort.removeprefix("-"), query.sort.startswith("-")
    if column not in SORTS:
        raise ValueError(f"rollouts cannot be sorted by `{column}`: choose one of {', '.join(SORTS)}")
    if column == "step":
        return indices[::-1] if down else indices
    values = view.rows[column][indices].astype(float)
    return indices[np.argsort(-values if down else values, kind="stable")]  # NaN comes last, either way


def _matching_indices(view: View, query: Query) -> NDArray[Any]:
    """Rows that fit all but the text, in rising order. Steps rise, so a range of them is found and not filtered."""
    low, high = query.step or _OPEN
    steps = view.rows["step"]
    first = 0 if low is None else int(np.searchsorted(steps, low, side="left"))
    last = None if high is None else int(np.searchsorted(steps, high, side="right"))
    rows = view.rows[first:last]
    fits = np.ones(len(rows), bool)
    for column in ("env", "actor", "state", "finish", "error"):
        wanted = getattr(query, column)
        if isinstance(wanted, bool):
            fits &= (rows[column] != 0) == wanted
        elif wanted is not None:
            fits &= np.isin(rows[column], _numbers(view, column, [wanted] if isinstance(wanted, str) else wanted))
    if query.domain is not None:
        fits &= rows["domain"] == (layout.DOMAINS.index(query.domain) if query.domain in layout.DOMAINS else 255)
    for column, value in (("ticket", query.ticket), ("row", query.row)):
        if value is not None:
            fits &= rows[column] == value
    for column, (low, high) in (("reward", query.reward or _OPEN), ("tokens", query.length or _OPEN)):
        if low is not None:
            fits &= rows[column] >= low
        if high is not None:
            fits &= rows[column] <= high
    return first + np.flatnonzero(fits)


def _numbers(view: View, column: str, names: Sequence[str]) -> list[int]:
    """The numbers that these names have; one ending in `:` stands for all that begin with it."""
    wanted, starts = set(names), tuple(name for name in names if name.endswith(":"))
    known = enumerate(zip(view.names, view.kinds, strict=True))
    found = [n for n, (name, kind) in known if kind == column and (name in wanted or name.startswith(starts))]
    return [*found, *([0] if "" in wanted else [])]
