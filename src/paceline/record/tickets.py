"""The life of every row that was drawn, from `tickets.jsonl`."""

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.monitor.directory import RunDirectory
from paceline.record.stored import identity

_COLUMNS: np.dtype[Any] = np.dtype(
    [
        ("number", "<i8"),
        ("env", "<u2"),
        ("epoch", "<i4"),
        ("draw", "<i8"),
        ("row", "<i8"),
        ("state", "<u2"),
        ("reason", "<u2"),
        ("step", "<i4"),
        ("since", "<i4"),
        ("replays", "<i8"),
    ]
)
_NOTHING = -(2**31)


_Small = Annotated[int, msgspec.Meta(ge=_NOTHING, lt=2**31)]
_Large = Annotated[int, msgspec.Meta(ge=_NOTHING, lt=2**62)]


class _Line(msgspec.Struct):
    number: _Large
    env: str = ""
    epoch: _Small = 0
    draw: _Large = 0
    row: _Large = 0
    state: str = ""
    reason: str = ""
    step: _Small = _NOTHING
    since: _Small = _NOTHING
    replays: _Large = _NOTHING


_decoder = msgspec.json.Decoder(_Line)


@dataclass(frozen=True, slots=True)
class FoundTickets:
    """A page of tickets, each as it stands now, and how many there are."""

    total: int
    rows: list[dict[str, Any]]


class Tickets:
    """Every ticket's states, in the order they came. Kept as columns: a long run has millions of lines."""

    def __init__(self, run: RunDirectory) -> None:
        self._path = run.tickets_file
        self._lock = threading.Lock()
        self._forget()

    def life(self, number: int, env: str | None = None) -> list[dict[str, Any]]:
        """All states of one ticket, the earliest first."""
        lines = self._read()
        found = lines["number"] == number
        if env is not None:
            found &= lines["env"] == self._names.get(env, -1)
        return [self._told(line) for line in lines[found]]

    def find(
        self,
        env: str | None = None,
        state: str | None = None,
        reason: str | None = None,
        offset: int = 0,
        limit: int | None = 50,
    ) -> FoundTickets:
        """Tickets by their last state, the newest first."""
        ends = self._ends(self._read())
        fits = np.ones(len(ends), bool)
        for column, name in (("env", env), ("state", state), ("reason", reason)):
            if name is not None:
                fits &= ends[column] == self._names.get(name, -1)
        page = ends[fits][offset : None if limit is None else offset + limit]
        return FoundTickets(int(fits.sum()), [self._told(line) for line in page])

    def dropped(self) -> dict[str, list[tuple[int, int]]]:
        """Groups dropped on the way to each step, by reason. The journal is written batch by batch, so what stands
        before a batch's own lines led to it."""
        lines = self._read()
        dropped = np.flatnonzero(lines["state"] == self._names.get("dropped", -1))
        trained = np.flatnonzero(lines["state"] == self._names.get("trained", -1))
        steps = np.append(lines["step"][trained], lines["step"][trained].max(initial=0) + 1)
        at = steps[np.searchsorted(trained, dropped)]
        counts = Counter(zip(lines["reason"][dropped].tolist(), at.tolist(), strict=True))
        found: dict[str, list[tuple[int, int]]] = {}
        for (reason, step), count in sorted(counts.items(), key=lambda item: item[0][1]):
            found.setdefault(self._order[reason], []).append((step, count))
        return found

    def problems(self) -> list[str]:
        self._read()
        many = f"{self._strange} lines are" if self._strange > 1 else "a line is"
        return [f"{self._path.name}: {many} no ticket's and left out"] if self._strange else []

    def _ends(self, lines: NDArray[Any]) -> NDArray[Any]:
        """The last line of each ticket, the newest ticket first; kept until lines are added, as sorting takes time."""
        known, ends = self._last
        if known is not lines:
            _, latest = np.unique(lines["number"][::-1], return_index=True)
            ends = lines[len(lines) - 1 - latest][::-1]
            self._last = lines, ends
        return ends

    # -- reading ------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._identity = (0, 0)
        self._at = self._strange = 0
        self._names: dict[str, int] = {"": 0}
        self._order = [""]
        self._lines = np.empty(0, _COLUMNS)
        self._last = self._lines, self._lines

    def _read(self) -> NDArray[Any]:
        with self._lock:
            device, inode, size = identity(self._path)
            if (device, inode) != self._identity or size < self._at:
                self._forget()
                self._identity = device, inode
            if size > self._at:
                with self._path.open("rb") as file:
                    file.seek(self._at)
                    data = file.read(size - self._at)
                data = data[: data.rfind(b"\n") + 1]
                self._at += len(data)
                self._lines = np.concatenate([self._lines, self._parsed(data)])
            return self._lines

    def _parsed(self, data: bytes) -> NDArray[Any]:
        try:
            lines = _decoder.decode_lines(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            lines = [line for raw in data.splitlines() if (line := self._one(raw)) is not None]
        columns = np.empty(len(lines), _COLUMNS)
        name = self._name
        columns["env"] = [name(line.env) for line in lines]
        columns["state"] = [name(line.state) for line in lines]
        columns["reason"] = [name(line.reason) for line in lines]
        for column in ("number", "epoch", "draw", "row", "step", "since", "replays"):
            columns[column] = [getattr(line, column) for line in lines]
        return columns

    def _one(self, raw: bytes) -> _Line | None:
        try:
            return _decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._strange += 1
            return None

    def _name(self, name: str) -> int:
        if name not in self._names:
            self._names[name] = len(self._order)
            self._order.append(name)
        return self._names[name]

    def _told(self, line: np.void) -> dict[str, Any]:
        told: dict[str, Any] = {key: int(line[key]) for key in ("number", "epoch", "draw", "row")}
        told |= {"env": self._order[line["env"]], "state": self._order[line["state"]]}
        if line["reason"]:
            told["reason"] = self._order[line["reason"]]
        return told | {key: int(line[key]) for key in ("step", "since", "replays") if line[key] != _NOTHING}
