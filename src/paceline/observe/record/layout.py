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
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

SCHEMA: Final = 1
NOWHERE: Final = 0xFFFF
"""More names than a row can tell apart: the rest are called `other`."""

TRAINING, EVALUATION, MATCH = 0, 1, 2
"""The purpose of a rollout."""
DOMAINS = ("training", "evaluation", "match")

BODY, IMAGES, CUT_TEXT = 1, 2, 4
"""Flags: the body was kept; a message holds an image or another part that is not text; not all text is searchable."""


class IndexRow(NamedTuple):
    """One row of `rollouts.index`."""

    step: int
    env: int
    actor: int
    kind: int
    state: int
    finish: int
    error: int
    domain: int
    flags: int
    ticket: int
    row: int
    member: int
    tokens: int
    """Sampled."""
    prompt: int
    """Of the first turn."""
    turns: int
    samples: int
    version_min: int
    version_max: int
    reward: float
    advantage: float
    """Mean over the tokens that train by rl; NaN if none does."""
    time: float
    offset: int
    size: int
    text_offset: int
    text_size: int


_KINDS = {
    **dict.fromkeys(("step", "member", "tokens", "prompt", "version_min", "version_max"), ("<i4", "i")),
    **dict.fromkeys(("env", "actor", "kind", "state", "finish", "error", "turns", "samples"), ("<u2", "H")),
    **dict.fromkeys(("domain", "flags"), ("u1", "B")),
    **dict.fromkeys(("ticket", "row"), ("<i8", "q")),
    **dict.fromkeys(("reward", "time"), ("<f8", "d")),
    "advantage": ("<f4", "f"),
    **dict.fromkeys(("offset", "text_offset"), ("<u8", "Q")),
    **dict.fromkeys(("size", "text_size"), ("<u4", "I")),
}
ROW: Final[np.dtype[Any]] = np.dtype([(name, _KINDS[name][0]) for name in IndexRow._fields])
PACK_ROW: Final = struct.Struct("<" + "".join(_KINDS[name][1] for name in IndexRow._fields))
NAMED: Final = ("env", "actor", "kind", "state", "finish", "error")
"""Columns that hold the numbers of names."""

LANE: Final[np.dtype[Any]] = np.dtype(
    [
        ("lane", "<u2"),
        ("kind", "<u2"),
        ("step", "<i4"),
        ("start", "<f8"),
        ("end", "<f8"),
        ("value", "<f4"),
        ("detail", "<u2"),
    ]
)
PACK_LANE: Final = struct.Struct("<HHiddfH")

assert PACK_ROW.size == ROW.itemsize
assert PACK_LANE.size == LANE.itemsize


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
