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

import math
import re
import struct
from collections import namedtuple
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any, Final

import numpy as np

from paceline.data.rollout import Rollout, Turn
from paceline.data.sample import Sample

SCHEMA: Final = 1
NOWHERE: Final = 0xFFFF
"""More names than a row can tell apart: the rest are called `other`."""

TRAINING, EVALUATION, MATCH = 0, 1, 2
"""The purpose of a rollout."""
DOMAINS = ("training", "evaluation", "match")

TRAINED, REPLAYED, SKIPPED = "trained", "replayed", "skipped"
"""States of a batch's rollouts: it trained; it trained once more; its step was left out, since it was bad."""
EVALUATED, MATCHED = "evaluated", "matched"
"""Played to see how good the policy is: on held-out rows, or against the league."""
FAILED, GIVEN_UP, NO_SAMPLE = "failed", "dropped:environment", "dropped:no_sample"
"""Fates of one rollout whatever became of its group: it broke; the environment let it go; nothing of it was left to
train on. Groups that are dropped for a reason have the state `dropped:<reason>`."""

BODY, IMAGES, CUT_TEXT = 1, 2, 4
"""Flags: the body was kept; a message holds an image or another part that is not text; not all text is searchable."""

NAMED: Final = ("env", "actor", "kind", "state", "finish", "error")
"""Columns that hold the numbers of names."""

_KIND = re.compile(r"\(failures\.(\w+) = ")
_MOST_TURNS = 0xFFFF
_SHORT = 64

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


def rollout_facts(rollout: Rollout, state: str) -> Facts:
    """The columns of a rollout of a batch or group that came to this state."""
    turns, ticket, samples = rollout.turns, rollout.ticket, rollout.samples
    oldest, newest = _versions(turns)
    return Facts(
        ticket.env,
        rollout.actor,
        rollout.kind,
        rollout_state(rollout, state),
        turns[-1].finish if turns else "",
        "" if rollout.error is None else error_kind(rollout.error, rollout.dropped),
        EVALUATION if state == EVALUATED else MATCH if state == MATCHED else TRAINING,
        ticket.number,
        ticket.row,
        rollout.member,
        len(turns[0].completion_ids) if len(turns) == 1 else sum([len(turn.completion_ids) for turn in turns]),
        len(turns[0].prompt_ids) if turns else 0,
        min(len(turns), _MOST_TURNS),
        min(len(samples), _MOST_TURNS),
        oldest,
        newest,
        math.nan if rollout.reward is None else rollout.reward,
        _advantage(samples),
    )


def _versions(turns: Sequence[Turn]) -> tuple[int, int]:
    """The oldest and the newest; -1 where nothing was sampled. Mostly all are one, which is soon seen."""
    versions = turns[0].versions if len(turns) == 1 else [version for turn in turns for version in turn.versions]
    if not versions:
        return -1, -1
    if versions.count(versions[0]) == len(versions):
        return versions[0], versions[0]
    return min(versions), max(versions)


def rollout_state(rollout: Rollout, state: str) -> str:
    """The fate of one rollout of a batch or group."""
    if state in (EVALUATED, MATCHED):
        return state
    if rollout.error is not None:
        return GIVEN_UP if rollout.dropped else FAILED
    if not rollout.samples and state in (TRAINED, REPLAYED, SKIPPED):
        return NO_SAMPLE
    return state


def error_kind(error: str, dropped: bool) -> str:
    """Of which kind a failure was, as the run file's section `failures` calls it."""
    found = _KIND.search(error)
    return found[1] if found else "dropped" if dropped else "episode"


def _advantage(samples: Sequence[Sample]) -> float:
    """Mean over all tokens that train by rl."""
    total, count = 0.0, 0
    for sample in samples:
        if (advantages := sample.advantages) is None:
            continue
        if sample.rl_weights is None and len(advantages) <= _SHORT:  # numpy would take three times as long
            said = list(compress(advantages.tolist(), sample.loss_mask.tolist()))
            total += sum(said)
            count += len(said)
            continue
        trained = sample.loss_mask if sample.rl_weights is None else sample.loss_mask & (sample.rl_weights != 0)
        values = advantages[trained]
        total += float(np.add.reduce(values))
        count += len(values)
    return total / count if count else math.nan
