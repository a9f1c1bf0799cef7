"""Asking for rollouts: pages of rows by what is wanted of them, and one rollout with all that was kept.

Each question looks at the files as they are now. Two readers and the writer need not know of one another.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.sample import Sample
from paceline.monitor.directory import RunDirectory
from paceline.record.facts import REPLAYED, SKIPPED, TRAINED
from paceline.record.layout import DOMAINS, NAMED, Places
from paceline.record.lines import Lines
from paceline.record.rows import Beside, Found, Gone, Query, Row, Told, row_of
from paceline.record.said import fold
from paceline.record.sampled import Sampled
from paceline.record.stored import Stored, identity, strange_schema

SORTS = ("step", "reward", "advantage", "tokens", "turns", "ticket", "time")
_TRIES = 5
"""A run that goes back while it is read is read again; more often than this nobody goes back."""

View = Stored | Sampled


class Rollouts:
    """All rollouts of a run, numbered in the order in which their fates became known."""

    def __init__(self, run: RunDirectory) -> None:
        self._at = Places(run.root)
        self._names = Lines(self._at.names)
        self._sample = Lines(run.rollouts_file)
        self._lock = threading.Lock()
        self._view: View | None = None

    @property
    def kept(self) -> bool:
        """Whether the run keeps every rollout; otherwise these are the few of `rollouts.jsonl`."""
        return strange_schema(self._at) is None and self._at.index.exists()

    def view(self) -> View:
        """The record at this moment. `.rows` is a numpy array of `layout.ROW`, `.names` what its numbers mean."""
        with self._lock:
            if not self.kept:
                self._view = Sampled(self._sample)
            elif not isinstance(self._view, Stored) or self._view.identity != identity(self._at.index):
                self._view = Stored(self._at, self._names, self._view if isinstance(self._view, Stored) else None)
            return self._view

    @property
    def count(self) -> int:
        return len(self.view().rows)

    def names(self, column: str) -> list[str]:
        """The values a column has had: `env`, `actor`, `kind`, `state`, `finish`, `error`."""
        view = self.view()
        return list(dict.fromkeys(name for name, kind in zip(view.names, view.kinds, strict=True) if kind == column))

    def find(self, query: Query | None = None) -> Found:
        query = query or Query()
        for view in self._views():
            ordered = _ordered(view, query)
            stop = None if query.limit is None else query.offset + query.limit
            rows = [row_of(int(at), view.rows[at], view.names) for at in ordered[query.offset : stop]]
            if view.fresh:
                return Found(len(ordered), rows)
        raise Gone("the run went back again and again while it was read: ask once more")

    def beside(self, index: int, query: Query | None = None) -> Beside | None:
        """Where a rollout stands in the whole list that a query gives, and its neighbours; None if it is not in it."""
        ordered = _ordered(self.view(), query or Query())
        found = np.flatnonzero(ordered == index)
        if not len(found):
            return None
        place = int(found[0])
        before, after = ordered[max(0, place - 1) : place], ordered[place + 1 : place + 2]
        return Beside(place, len(ordered), *(int(side[0]) if len(side) else None for side in (before, after)))

    def get(self, index: int) -> Told:
        """One rollout, whole; raises `Gone` where there is none of this number or its body cannot be read."""
        for view in self._views():
            if not 0 <= index < len(view.rows):
                raise Gone(f"there is no rollout {index}: the run has {len(view.rows)}")
            try:
                told = view.told(index)
            except Gone:
                if view.fresh:
                    raise
                continue
            if view.fresh:
                return told
        raise Gone("the run went back again and again while it was read: ask once more")

    def row(self, index: int) -> Row:
        view = self.view()
        if not 0 <= index < len(view.rows):
            raise Gone(f"there is no rollout {index}: the run has {len(view.rows)}")
        return row_of(index, view.rows[index], view.names)

    def mates(self, index: int) -> list[int]:
        """All rollouts of its group, itself included: of the same ticket, in the same batch or evaluation."""
        return self._alike(index, ("env", "ticket", "domain"))

    def episode(self, index: int) -> list[int]:
        """All seats of its episode, itself included."""
        return self._alike(index, ("env", "ticket", "domain", "member"))

    def steps(self) -> list[int]:
        """Batches that trained."""
        view = self.view()
        trained = np.isin(view.rows["state"], _numbers(view, "state", [TRAINED, REPLAYED, SKIPPED]))
        return np.unique(view.rows["step"][trained]).tolist()

    def batch(self, step: int) -> list[Sample]:
        """The samples that a step trained on, in the order they shipped in."""
        view = self.view()
        first, last = np.searchsorted(view.rows["step"], [step, step + 1])
        trained = _numbers(view, "state", [TRAINED, REPLAYED, SKIPPED])
        places = first + np.flatnonzero(np.isin(view.rows["state"][first:last], trained))
        return [sample for at in places for sample in self.get(int(at)).samples]

    def problems(self) -> list[str]:
        strange = strange_schema(self._at)
        if strange is not None:
            return [f"{strange}; until then only the rollouts of rollouts.jsonl are shown", *self._sample.problems()]
        view = self.view()
        found = self._names.problems() if self.kept else self._sample.problems()
        if view.missing:
            found.append(
                f"record/ is cut short: of {view.missing} rollouts the rows are there and the contents are not"
            )
        return found

    def _views(self) -> Iterator[View]:
        for _ in range(_TRIES):
            yield self.view()

    def _alike(self, index: int, columns: Sequence[str]) -> list[int]:
        view = self.view()
        if not 0 <= index < len(view.rows):
            raise Gone(f"there is no rollout {index}: the run has {len(view.rows)}")
        step = view.rows["step"][index]
        first, last = np.searchsorted(view.rows["step"], [step, step + 1])
        block = view.rows[first:last]
        alike = np.ones(len(block), bool)
        for column in columns:
            alike &= block[column] == view.rows[index][column]
        return (first + np.flatnonzero(alike)).tolist()


def _ordered(view: View, query: Query) -> NDArray[Any]:
    """All that is asked for, in its order."""
    indices = _selected(view, query)
    if query.text:
        indices = view.saying(fold(query.text), indices)
    return _sorted(view, indices, query.sort)


def _selected(view: View, query: Query) -> NDArray[Any]:
    """Rows that fit all but the text, in rising order. Steps rise, so a range of them is found and not filtered."""
    rows, first, last = view.rows, 0, len(view.rows)
    if query.step is not None:
        low, high = query.step
        first = 0 if low is None else int(np.searchsorted(rows["step"], low, side="left"))
        last = last if high is None else int(np.searchsorted(rows["step"], high, side="right"))
    rows = rows[first : max(first, last)]
    fits = np.ones(len(rows), bool)
    for column, wanted in (
        ("env", query.env),
        ("actor", query.actor),
        ("state", query.state),
        ("finish", query.finish),
    ):
        if wanted is not None:
            fits &= np.isin(rows[column], _numbers(view, column, [wanted] if isinstance(wanted, str) else wanted))
    if isinstance(query.error, bool):
        fits &= (rows["error"] != 0) == query.error
    elif query.error is not None:
        fits &= np.isin(rows["error"], _numbers(view, "error", [query.error]))
    if query.domain is not None:
        fits &= rows["domain"] == (DOMAINS.index(query.domain) if query.domain in DOMAINS else 255)
    for column, value in (("ticket", query.ticket), ("row", query.row)):
        if value is not None:
            fits &= rows[column] == value
    for column, span in (("reward", query.reward), ("tokens", query.length)):
        low, high = span or (None, None)
        if low is not None:
            fits &= rows[column] >= low
        if high is not None:
            fits &= rows[column] <= high
    return first + np.flatnonzero(fits)


def _sorted(view: View, indices: NDArray[Any], sort: str) -> NDArray[Any]:
    column, down = sort.removeprefix("-"), sort.startswith("-")
    if column not in SORTS:
        raise ValueError(f"rollouts cannot be sorted by `{column}`: choose one of {', '.join(SORTS)}")
    if column == "step":
        return indices[::-1] if down else indices
    values = view.rows[column][indices].astype(float)
    return indices[np.argsort(-values if down else values, kind="stable")]  # NaN comes last, either way


def _numbers(view: View, column: str, names: Sequence[str]) -> list[int]:
    """The numbers that these names have; one ending in `:` stands for all that begin with it."""
    assert column in NAMED
    wanted = set(names)
    starts = tuple(name for name in wanted if name.endswith(":"))
    found = [
        number
        for number, (name, kind) in enumerate(zip(view.names, view.kinds, strict=True))
        if kind == column and (name in wanted or (starts and name.startswith(starts)))
    ]
    return [*found, *([0] if "" in wanted else [])]
