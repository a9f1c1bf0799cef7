"""Reads the states of every ticket from `tickets.jsonl` into columns: a long run has millions of lines, too many for an
object each."""

import contextlib
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.observe.monitor.directory import RunDirectory, replace_file, skipped_lines_note
from paceline.observe.record.layout import identity
from paceline.observe.record.rows import ResultPage

NAMED = ("env", "state", "reason")
"""Columns that hold the number of a name."""
LINE: np.dtype[Any] = np.dtype(
    [
        *((column, "<i8") for column in ("number", "draw", "row", "replays")),
        *((column, "<i4") for column in ("epoch", "step", "since")),
        *((column, "<u2") for column in NAMED),
    ]
)
MISSING_VALUE = -(2**31)
"""The value of a column that a line leaves out."""
MOST_NAMES = 2**16
SCHEMA = 1
_BLOCK = 1 << 20
_LINES_WORTH_SAVING = 50_000
"""So many lines that were read anew are worth keeping beside the journal."""
_QUICK_BYTES = 4 << 20
"""Bytes that are read without a noticeable delay."""

_Small = Annotated[int, msgspec.Meta(ge=MISSING_VALUE, lt=2**31)]
_Large = Annotated[int, msgspec.Meta(ge=MISSING_VALUE, lt=2**62)]


class _Line(msgspec.Struct, gc=False):
    number: _Large
    env: str = ""
    epoch: _Small = 0
    draw: _Large = 0
    row: _Large = 0
    state: str = ""
    reason: str = ""
    step: _Small = MISSING_VALUE
    since: _Small = MISSING_VALUE
    replays: _Large = MISSING_VALUE


_line_decoder = msgspec.json.Decoder(_Line)


class NameTable(dict[str, int]):
    """The number that columns have for each name, counted from 0. Numbers stay as they are while names are added."""

    def __missing__(self, name: str) -> int:
        """New names are added while there is room, which is more than any run needs."""
        if len(self) >= MOST_NAMES:
            return 0
        self[name] = number = len(self)
        return number


def parse_lines(data: bytes, names: NameTable) -> tuple[NDArray[Any], list[int]]:
    """Whole lines as columns, and which of them (counted from 0) are no ticket's and left out."""
    lines, strange = _decode_lines(data)
    columns = np.empty(len(lines), LINE)
    for column in LINE.names or ():
        values = map(attrgetter(column), lines)
        columns[column] = np.fromiter(map(names.__getitem__, values) if column in NAMED else values, "<i8", len(lines))
    return columns, strange


def as_dict(line: np.void, names: Sequence[str]) -> dict[str, Any]:
    """A line as it was written."""
    found: dict[str, Any] = {key: int(line[key]) for key in ("number", "epoch", "draw", "row")}
    found |= {key: names[line[key]] for key in NAMED if line[key] or key != "reason"}
    return found | {key: int(line[key]) for key in ("step", "since", "replays") if line[key] != MISSING_VALUE}


def _decode_lines(data: bytes) -> tuple[list[_Line], list[int]]:
    """All lines at once; one by one only where that fails, or where a line may hold none or two objects."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        lines, count = _line_decoder.decode_lines(data), data.count(b"\n")
        if len(lines) == count == data.count(b"}\n{") + 1:
            return lines, []
    lines, strange = [], []
    for place, line in enumerate(data.split(b"\n")[:-1]):
        try:
            lines.append(_line_decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            strange.append(place)
    return lines, strange


class JournalPosition(msgspec.Struct):
    """How far the journal was read, and what the lines leave out."""

    at: int = 0
    """Bytes that were read; the next line begins there."""
    digest: str = ""
    """Their fingerprint, as of the last time this was saved."""
    count: int = 0
    """Lines that were read, those that are no ticket's among them."""
    strange: int = 0
    first: int = 0
    """The number of the first that is no ticket's, counted from 1; 0 where there is none."""
    names: list[str] = msgspec.field(default_factory=lambda: [""])
    schema: int = SCHEMA


def digest(journal: int, at: int) -> str:
    """A fingerprint of what stands before a place in a file; a tenth of the time that reading it as JSON takes."""
    found = hashlib.sha256()
    for start in range(0, at, _BLOCK):
        found.update(os.pread(journal, min(_BLOCK, at - start), start))
    return found.hexdigest()


class _Journal:
    """All lines at one moment. It does not change: other threads read it while new lines come."""

    def __init__(self, lines: NDArray[Any], numbers: NameTable) -> None:
        self.lines, self.names = lines, list(numbers)

    @cached_property
    def order(self) -> NDArray[Any]:
        """Places of lines by ticket, those of one ticket in the order they came."""
        return np.argsort(self.lines["number"], kind="stable")

    @cached_property
    def numbers(self) -> NDArray[Any]:
        return self.lines["number"][self.order]

    @cached_property
    def ends(self) -> NDArray[Any]:
        """The last line of each ticket, the newest ticket first."""
        last = np.flatnonzero(np.diff(self.numbers, append=MISSING_VALUE - 1))
        return self.lines[self.order[last[::-1]]]

    def number(self, name: str) -> int:
        """The number of a name, -1 where no line has it."""
        return self.names.index(name) if name in self.names else -1


class Tickets:
    """Every ticket's states, in the order they came. What was read once is kept, and only new lines are read."""

    def __init__(self, run: RunDirectory, worth: int = _LINES_WORTH_SAVING) -> None:
        self._path = run.tickets_file
        self._index = run.root / ".tickets.index"
        self._worth = worth
        self._lock = threading.Lock()
        self._forget()

    def history(self, number: int, env: str | None = None) -> list[dict[str, Any]]:
        """All states of one ticket, the earliest first."""
        journal = self._read()
        first, last = np.searchsorted(journal.numbers, [number, number + 1])
        lives = [as_dict(line, journal.names) for line in journal.lines[journal.order[first:last]]]
        return [line for line in lives if env is None or line["env"] == env]

    def find(
        self,
        env: str | None = None,
        state: str | None = None,
        reason: str | None = None,
        offset: int = 0,
        limit: int | None = 50,
    ) -> ResultPage[dict[str, Any]]:
        """Tickets by their last state, the newest first."""
        journal = self._read()
        fitting = journal.ends
        for column, name in (("env", env), ("state", state), ("reason", reason)):
            if name is not None:
                fitting = fitting[fitting[column] == journal.number(name)]
        page = fitting[offset : None if limit is None else offset + limit]
        return ResultPage(len(fitting), [as_dict(line, journal.names) for line in page])

    def states(self) -> dict[str, int]:
        """How many tickets are in each state now."""
        journal = self._read()
        counts = enumerate(np.bincount(journal.ends["state"]).tolist())
        return {journal.names[number]: count for number, count in counts if count}

    def dropped(self) -> dict[str, list[tuple[int, int]]]:
        """Groups dropped on the way to each step, by reason. The journal is written batch by batch, so what stands
        before a batch's own lines led to it."""
        journal = self._read()
        lines = journal.lines
        dropped, trained = (np.flatnonzero(lines["state"] == journal.number(state)) for state in ("dropped", "trained"))
        steps = np.append(lines["step"][trained], lines["step"][trained].max(initial=0) + 1)
        at = steps[np.searchsorted(trained, dropped)]
        counts = Counter(zip(lines["reason"][dropped].tolist(), at.tolist(), strict=True))
        found: dict[str, list[tuple[int, int]]] = {}
        for (reason, step), count in sorted(counts.items(), key=lambda item: item[0][1]):
            found.setdefault(journal.names[reason], []).append((step, count))
        return found

    def problems(self, patient: bool = True) -> list[str]:
        """What could not be read. Without `patient`, only what is known, where the rest would take a while to read."""
        if patient or identity(self._path)[2] - self._position.at < _QUICK_BYTES:
            self._read()
        return skipped_lines_note(self._path, "no ticket's", self._position.strange, self._position.first)

    def _forget(self) -> None:
        self._identity = (0, 0)
        self._position, self._saved, self._numbers = JournalPosition(), 0, NameTable({"": 0})
        self._journal = _Journal(np.empty(0, LINE), self._numbers)

    def _read(self) -> _Journal:
        with self._lock:
            try:
                file = self._path.open("rb")
            except OSError:
                self._forget()
                return self._journal
            with file:
                now = os.fstat(file.fileno())
                if (now.st_dev, now.st_ino) != self._identity or now.st_size < self._position.at:
                    self._forget()
                    self._identity = now.st_dev, now.st_ino
                    self._load_index(file.fileno(), now.st_size)
                if now.st_size > self._position.at:
                    self._read_on(file)
            return self._journal

    def _load_index(self, journal: int, size: int) -> None:
        """Begin where an earlier reader stopped, if the index is of this open journal."""
        try:
            with self._index.open("rb") as file:
                head = msgspec.json.decode(file.readline(), type=JournalPosition)
                lines = np.frombuffer(file.read(), LINE)
        except (OSError, ValueError, msgspec.DecodeError):
            return
        same = head.schema == SCHEMA and 0 <= head.at <= size
        known = all(lines[column].max(initial=0) < len(set(head.names)) for column in NAMED)
        whole = known and len(lines) == head.count - head.strange
        if same and whole and digest(journal, head.at) == head.digest:
            self._position, self._saved = head, head.count
            self._numbers = NameTable({name: number for number, name in enumerate(head.names)})
            self._journal = _Journal(lines, self._numbers)

    def _read_on(self, file: BinaryIO) -> None:
        """Read what came since, block by block: all of it at once would take ten times its room."""
        position, found = self._position, [self._journal.lines]
        file.seek(position.at)
        for data in _whole_lines(file):
            lines, strange = parse_lines(data, self._numbers)
            if strange and not position.first:
                position.first = position.count + strange[0] + 1
            position.strange += len(strange)
            position.at += len(data)
            position.count += len(lines) + len(strange)
            found.append(lines)
        if len(found) > 1:
            self._journal = _Journal(np.concatenate(found), self._numbers)
        if position.count - self._saved >= self._worth:
            position.digest, position.names = digest(file.fileno(), position.at), self._journal.names
            saved = [msgspec.json.encode(position), b"\n", self._journal.lines.tobytes()]
            with contextlib.suppress(OSError):  # a folder that may only be read
                replace_file(self._index, saved, durable=False)
            self._saved = position.count


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """The whole lines from here on, in blocks; what follows the last line's end is not there yet."""
    while data := file.read(_BLOCK) + file.readline():
        if whole := data[: data.rfind(b"\n") + 1]:
            yield whole
        if whole != data:
            return
