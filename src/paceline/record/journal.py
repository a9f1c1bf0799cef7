"""Parses `tickets.jsonl` into columns: a long run has millions of lines, too many for an object each."""

import contextlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

LINE: np.dtype[Any] = np.dtype(
    [
        ("number", "<i8"),
        ("draw", "<i8"),
        ("row", "<i8"),
        ("replays", "<i8"),
        ("epoch", "<i4"),
        ("step", "<i4"),
        ("since", "<i4"),
        ("env", "<u2"),
        ("state", "<u2"),
        ("reason", "<u2"),
    ]
)
NAMED = ("env", "state", "reason")
"""Columns that hold the number of a name."""
COUNTED = ("number", "draw", "row", "replays", "epoch", "step", "since")
NOTHING = -(2**31)
"""The value of a column that a line leaves out."""
MOST_NAMES = 2**16

_Small = Annotated[int, msgspec.Meta(ge=NOTHING, lt=2**31)]
_Large = Annotated[int, msgspec.Meta(ge=NOTHING, lt=2**62)]


class _Line(msgspec.Struct, gc=False):
    number: _Large
    env: str = ""
    epoch: _Small = 0
    draw: _Large = 0
    row: _Large = 0
    state: str = ""
    reason: str = ""
    step: _Small = NOTHING
    since: _Small = NOTHING
    replays: _Large = NOTHING


_decoder = msgspec.json.Decoder(_Line)


class NameTable:
    """Every name once, by the number that columns have for it. Numbers stay as they are while names are added."""

    def __init__(self, names: Sequence[str] = ("",)) -> None:
        self.all = list(names)
        self._numbers = {name: number for number, name in enumerate(names)}

    def number(self, name: str) -> int:
        """Its number, -1 where no line has it."""
        return self._numbers.get(name, -1)

    def numbered(self, rows: Sequence[tuple[str, ...]]) -> NDArray[Any]:
        """The numbers of each row's names. Few rows differ in them, so a row is looked up as a whole."""
        kinds = {row: kind for kind, row in enumerate(dict.fromkeys(rows))}
        numbers = np.array([[self._add(name) for name in row] for row in kinds], "<u2").reshape(-1, len(NAMED))
        return numbers[np.fromiter(map(kinds.__getitem__, rows), "<i8", len(rows))]

    def _add(self, name: str) -> int:
        """Its number; new ones are added while there is room, which is more than any run needs."""
        if name not in self._numbers:
            self._numbers[name] = len(self.all) if len(self.all) < MOST_NAMES else 0
            self.all += [name] if self._numbers[name] else []
        return self._numbers[name]


def parsed(data: bytes, names: NameTable) -> tuple[NDArray[Any], list[int]]:
    """Whole lines as columns, and which of them (counted from 0) are no ticket's and left out."""
    lines, strange = _decoded(data)
    columns = np.empty(len(lines), LINE)
    named = names.numbered(list(map(attrgetter(*NAMED), lines)))
    for place, column in enumerate(NAMED):
        columns[column] = named[:, place]
    for column in COUNTED:
        columns[column] = np.fromiter(map(attrgetter(column), lines), "<i8", len(lines))
    return columns, strange


def told(line: np.void, names: NameTable) -> dict[str, Any]:
    """A line as it was written."""
    found: dict[str, Any] = {key: int(line[key]) for key in ("number", "epoch", "draw", "row")}
    found |= {key: names.all[line[key]] for key in ("env", "state")}
    if line["reason"]:
        found["reason"] = names.all[line["reason"]]
    return found | {key: int(line[key]) for key in ("step", "since", "replays") if line[key] != NOTHING}


def _decoded(data: bytes) -> tuple[list[_Line], list[int]]:
    """All lines at once; one by one only where that fails, or where a line may hold none or two objects."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        lines, count = _decoder.decode_lines(data), data.count(b"\n")
        if len(lines) == count == data.count(b"}\n{") + 1:
            return lines, []
    lines, strange = [], []
    for place, line in enumerate(data.split(b"\n")[:-1]):
        try:
            lines.append(_decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            strange.append(place)
    return lines, strange
