"""The files of the record in a run directory: the layout of their rows, and the writer that appends to them.

    record/schema.json      {"schema": 1}
    record/rollouts.index   one fixed-width row a rollout: what lists, filters and charts need
    record/rollouts.data    one msgpack body a rollout: messages, tokens, samples with all their streams
    record/rollouts.text    what was said, case-folded UTF-8, one rollout after the other, for searching alone
    record/lanes.index      one fixed-width row a span of time: lane, kind, start and end
    record/scores.index     one fixed-width row a step: where its scores lie
    record/scores.data      what the trainer computed for each trained token (`data.sample`), batch after batch
    record/names.jsonl      the strings that rows name by number; the first line is number 1, and 0 is nothing

A row is written after all that it points at, so whatever a crash cuts off, the rows before it can be read. Steps never
fall from one row to the next: going back to a step is cutting a tail off. One process writes: the one that holds the
run's lock. Rows are never changed. To go back, the index is replaced, so that readers who have mapped the old one keep
what they see and notice; only then are text and bodies cut, which no reader maps.
"""

import json
import math
import os
import re
import struct
from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceline.data.rollout import Rollout, all_equal
from paceline.data.sample import Sample, TokenScores
from paceline.errors import PacelineError
from paceline.observe.monitor.directory import append_jsonl, drop_torn_line, read_jsonl, replace_file, write_all

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

MOST_NAMES = 60_000
"""Names a row can tell apart, with some room: actors may be called anything, and differently each time."""
_BLOCK = 1 << 22
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

_SCORE_TYPES = {"step": "i", "samples": "I", "offset": "Q", "size": "Q"}
"""The columns of `scores.index`. At `offset` lie `TokenScores.samples` of so many samples, then `TokenScores.tokens`;
`size` is of both."""

ROW: Final[np.dtype[Any]] = np.dtype([(name, f"<{letter}") for name, letter in _ROW_TYPES.items()])
PACK_ROW: Final = struct.Struct("<" + "".join(_ROW_TYPES.values()))
LANE: Final[np.dtype[Any]] = np.dtype([(name, f"<{letter}") for name, letter in _LANE_TYPES.items()])
PACK_LANE: Final = struct.Struct("<" + "".join(_LANE_TYPES.values()))
SCORES: Final[np.dtype[Any]] = np.dtype([(name, f"<{letter}") for name, letter in _SCORE_TYPES.items()])
PACK_SCORES: Final = struct.Struct("<" + "".join(_SCORE_TYPES.values()))

_PLACES = ("step", "flags", "time", "offset", "size", "text_offset", "text_size")
Facts = namedtuple("Facts", [name for name in _ROW_TYPES if name not in _PLACES])
"""What a row says of a rollout itself, before names become numbers."""

Names = dict[tuple[str, str], int]
"""The numbers that rows have for names, by column and name; 0 is nothing."""


def index_row(step: int, names: Names, facts: Facts, flags: int = 0, place: int = 0) -> tuple[Any, ...]:
    """A row in memory; names it is the first to have are added."""
    numbers = [names.setdefault(key, len(names) + 1) if key[1] else 0 for key in zip(NAMED, facts, strict=False)]
    return (step, *numbers, facts.domain, flags, *facts[7:], 0.0, place, 0, 0, 0)


def escape_surrogates(text: str) -> str:
    """Text that UTF-8 can hold."""
    return text.encode("utf-8", "backslashreplace").decode()


class RecordFiles:
    def __init__(self, run: Path) -> None:
        self.folder = Path(run) / "record"
        self.schema = self.folder / "schema.json"
        self.index = self.folder / "rollouts.index"
        self.data = self.folder / "rollouts.data"
        self.text = self.folder / "rollouts.text"
        self.lanes = self.folder / "lanes.index"
        self.scores, self.scores_data = self.folder / "scores.index", self.folder / "scores.data"
        self.names = self.folder / "names.jsonl"

    def schema_problem(self) -> str | None:
        """Why the record cannot be read, if it is another version's."""
        try:
            schema = json.loads(self.schema.read_text())["schema"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError):
            return "record/schema.json cannot be read, so the layout of record/ is unknown: restore it"
        if schema == SCHEMA:
            return None
        return f"record/ is of schema {schema!r} and this Paceline reads schema {SCHEMA}: use the version that wrote it"


def rollout_facts(rollout: Rollout, state: str) -> Facts:
    """The columns of a rollout of a batch or group that came to this state."""
    turns, ticket, samples = rollout.turns, rollout.ticket, rollout.samples
    versions = turns[0].versions if len(turns) == 1 else [version for turn in turns for version in turn.versions]
    one = all_equal(versions)  # as nearly always, and soon seen
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
        versions[0] if one else min(versions, default=-1),
        versions[0] if one else max(versions, default=-1),
        math.nan if rollout.reward is None else rollout.reward,
        _advantage(samples),
    )


def rollout_state(rollout: Rollout, state: str) -> str:
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


class RecordWriter:
    """Appends rows with what they point at. A crash in the middle leaves a tail that the next opening cuts off."""

    def __init__(self, run: Path) -> None:
        self._at = at = RecordFiles(run)
        at.folder.mkdir(exist_ok=True)
        if at.schema.exists():
            if (schema := json.loads(at.schema.read_text()).get("schema")) != SCHEMA:
                raise PacelineError(
                    f"{at.folder} was written in schema {schema}, and this version of Paceline writes {SCHEMA}: resume "
                    "with the version that began the run, or move the folder away"
                )
        else:
            replace_file(at.schema, [json.dumps({"schema": SCHEMA}).encode()])
        drop_torn_line(at.names)
        self._names = {(line["kind"], line["name"]): n for n, line in enumerate(read_jsonl(at.names), start=1)}
        self._numbers: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._new: list[dict[str, str]] = []
        paths = (at.data, at.text, at.index, at.lanes, at.scores, at.scores_data)
        self._files = {path: _open_for_append(path) for path in paths}
        self._keep_rows(count_complete_rows(self.rows(), *self.ends, len(self._names)))
        self._truncate(at.lanes, self.size(at.lanes) // LANE.itemsize * LANE.itemsize)
        scores = map_rows(at.scores, SCORES)
        self._keep_scores(int(np.searchsorted(scores["offset"] + scores["size"], self.size(at.scores_data), "right")))

    @property
    def ends(self) -> tuple[int, int]:
        """Bytes of bodies and of text so far."""
        return self.size(self._at.data), self.size(self._at.text)

    def rows(self) -> NDArray[Any]:
        """The index, as far as its rows are whole."""
        return map_rows(self._at.index, ROW)

    def name(self, kind: str, name: str) -> int:
        """The number of a name, which is written with the next rows."""
        if not name:
            return 0
        if (number := self._names.get((kind, name))) is None:
            if len(self._names) >= MOST_NAMES and name != "other":
                return self.name(kind, "other")
            self._names[kind, name] = number = len(self._names) + 1
            self._new.append({"kind": kind, "name": escape_surrogates(name)})
        return number

    def pack_row(self, step: int, time: float, facts: Facts, flags: int, place: tuple[int, int, int, int]) -> bytes:
        """A row whose body and text have this place: offset and size of each."""
        names = facts[: len(NAMED)]
        if (numbers := self._numbers.get(names)) is None:  # most rows have the names of one before
            numbers = tuple(self.name(kind, name) for kind, name in zip(NAMED, names, strict=True))
            if len(self._numbers) < MOST_NAMES:
                self._numbers[names] = numbers
        return PACK_ROW.pack(step, *numbers, facts.domain, flags, *facts[7:], time, *place)

    def append(self, rows: Sequence[bytes], data: Sequence[bytes], text: Sequence[bytes]) -> None:
        """Bodies, text and names first, then the rows that point at them."""
        write_all(self._files[self._at.data], b"".join(data))
        write_all(self._files[self._at.text], b"".join(text))
        self._write_names()
        write_all(self._files[self._at.index], b"".join(rows))

    def append_lanes(self, step: int, spans: Iterable[tuple[str, str, float, float, float]]) -> None:
        """Spans of time: lane, kind, start, end and value."""
        rows = [
            PACK_LANE.pack(self.name("lane", lane), self.name("span", kind), step, *figures, 0)
            for lane, kind, *figures in spans
        ]
        self._write_names()
        write_all(self._files[self._at.lanes], b"".join(rows))

    def append_scores(self, step: int, scores: TokenScores) -> None:
        """What the trainer computed for the tokens of a step's batch."""
        place, size = self.size(self._at.scores_data), len(scores.samples) + len(scores.tokens)
        write_all(self._files[self._at.scores_data], scores.samples + scores.tokens)
        write_all(self._files[self._at.scores], PACK_SCORES.pack(step, len(scores.samples) // 8, place, size))

    def truncate_after(self, step: int) -> None:
        """Take out what came after a step; all of it where the run begins anew, and then the time before it too."""
        if step <= 0:
            self._keep_rows(0)
            self._keep_scores(0)
            self._replace(self._at.lanes, 0)
        else:
            self._keep_rows(int(np.searchsorted(self.rows()["step"], step, side="right")))
            self._keep_scores(int(np.searchsorted(map_rows(self._at.scores, SCORES)["step"], step, side="right")))

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def size(self, path: Path) -> int:
        return os.fstat(self._files[path]).st_size

    def _keep_rows(self, count: int) -> None:
        rows = self.rows()
        if count < len(rows):
            self._replace(self._at.index, count * ROW.itemsize)
        self._truncate(self._at.index, count * ROW.itemsize)
        for path, at in ((self._at.data, ""), (self._at.text, "text_")):
            self._truncate(path, int(rows[f"{at}offset"][count - 1] + rows[f"{at}size"][count - 1]) if count else 0)

    def _keep_scores(self, count: int) -> None:
        rows = map_rows(self._at.scores, SCORES)
        if count < len(rows):
            self._replace(self._at.scores, count * SCORES.itemsize)
        self._truncate(self._at.scores, count * SCORES.itemsize)
        self._truncate(self._at.scores_data, int(rows["offset"][count - 1] + rows["size"][count - 1]) if count else 0)

    def _replace(self, path: Path, size: int) -> None:
        """The same file, but its first bytes alone, under a new identity."""
        descriptor = self._files[path]
        blocks = (os.pread(descriptor, min(_BLOCK, size - start), start) for start in range(0, size, _BLOCK))
        replace_file(path, blocks, durable=False)
        os.close(descriptor)
        self._files[path] = _open_for_append(path)

    def _truncate(self, path: Path, size: int) -> None:
        if self.size(path) > size:
            os.ftruncate(self._files[path], size)

    def _write_names(self) -> None:
        if self._new:
            append_jsonl(self._at.names, self._new)
            self._new = []


def count_complete_rows(rows: NDArray[Any], data: int, text: int, names: int) -> int:
    """How many rows from the first on have all that they point at, in files of these sizes."""
    ends = (rows["offset"] + rows["size"], data), (rows["text_offset"] + rows["text_size"], text)
    count = min(int(np.searchsorted(at, size, side="right")) for at, size in ends)
    for column in NAMED:
        if (unknown := rows[column][:count] > names).any():
            count = int(np.argmax(unknown))
    return count


def map_rows(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The whole rows of a file, without reading it."""
    try:
        with path.open("rb") as file:
            count = os.fstat(file.fileno()).st_size // dtype.itemsize
            return np.memmap(file, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)
    except FileNotFoundError:
        return np.empty(0, dtype)


def identity(path: Path) -> tuple[int, int, int]:
    """Which file this is, and how long."""
    try:
        status = path.stat()
        return status.st_dev, status.st_ino, status.st_size
    except OSError:
        return 0, 0, 0


def _open_for_append(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
