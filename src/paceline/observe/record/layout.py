"""The files of the record in a run directory, and the layout of their rows. Writer and readers share this file alone.

    record/schema.json      {"schema": 1}
    record/rollouts.index   one fixed-width row a rollout: what lists, filters and charts need
    record/rollouts.data    one msgpack body a rollout: messages, tokens, samples with all their streams
    record/rollouts.text    what was said, case-folded UTF-8, one rollout after the other, for searching alone
    record/lanes.index      one fixed-width row a span of time: lane, kind, start and end
    record/names.jsonl      the strings that rows name by number; the first line is number 1, and 0 is nothing

A row is written after all that it points at, so whatever a crash cuts off, the rows before it can be read. Steps never
fall from one row to the next: going back to a step is cutting a tail off.
"""

import struct
from collections import namedtuple
from pathlib import Path
from typing import Any, Final

import numpy as np

SCHEMA: Final = 1
NOWHERE: Final = 0xFFFF
"""More names than a row can tell apart: the rest are called `other`."""

TRAINING, EVALUATION, MATCH = 0, 1, 2
"""The purpose of a rollout."""
DOMAINS = ("training", "evaluation", "match")

BODY, IMAGES, CUT_TEXT = 1, 2, 4
"""Flags: the body was kept; a message holds an image or another part that is not text; not all text is searchable."""

NAMED: Final = ("env", "actor", "kind", "state", "finish", "error")
"""Columns that hold the numbers of names."""

_ROW_TYPES = {
    "step": "i",
    **dict.fromkeys(NAMED, "H"),
    "domain": "B",
    "flags": "B",
    "ticket": "q",
    "row": "q",
    "member": "i",
    "tokens": "i",  # sampled
    "prompt": "i",  # of the first turn
    "turns": "H",
    "samples": "H",
    "version_min": "i",
    "version_max": "i",
    "reward": "d",
    "advantage": "f",  # mean over the tokens that train by rl; NaN if none does
    "time": "d",
    "offset": "Q",
    "size": "I",
    "text_offset": "Q",
    "text_size": "I",
}
"""The columns of `rollouts.index` in their order, by the letters that `struct` and numpy have for their types."""
_LANE_TYPES = {"lane": "H", "kind": "H", "step": "i", "start": "d", "end": "d", "value": "f", "detail": "H"}

ROW: Final[np.dtype[Any]] = np.dtype([(name, f"<{letter}") for name, letter in _ROW_TYPES.items()])
PACK_ROW: Final = struct.Struct("<" + "".join(_ROW_TYPES.values()))
LANE: Final[np.dtype[Any]] = np.dtype([(name, f"<{letter}") for name, letter in _LANE_TYPES.items()])
PACK_LANE: Final = struct.Struct("<" + "".join(_LANE_TYPES.values()))

_columns = tuple(_ROW_TYPES)
Facts = namedtuple("Facts", [*NAMED, "domain", *_columns[_columns.index("ticket") : _columns.index("time")]])
"""What a row says of a rollout itself, before names become numbers."""

Names = dict[tuple[str, str], int]
"""The numbers that rows have for names, by column and name; 0 is nothing."""


def index_row(step: int, names: Names, facts: Facts, flags: int = 0, place: int = 0) -> tuple[Any, ...]:
    """A row in memory; names it is the first to have are added."""
    numbers = [names.setdefault(key, len(names) + 1) if key[1] else 0 for key in zip(NAMED, facts, strict=False)]
    return (step, *numbers, facts.domain, flags, *facts[7:], 0.0, place, 0, 0, 0)


class RecordFiles:
    """The record's files below a run directory."""

    def __init__(self, run: Path) -> None:
        self.folder = Path(run) / "record"
        self.schema = self.folder / "schema.json"
        self.index = self.folder / "rollouts.index"
        self.data = self.folder / "rollouts.data"
        self.text = self.folder / "rollouts.text"
        self.lanes = self.folder / "lanes.index"
        self.names = self.folder / "names.jsonl"
