"""A snapshot of a run's record: rows mapped, names read, bodies and texts read on demand."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from paceline.data.rollout import decompress_stream
from paceline.data.sample import RENAMED_STREAMS, STREAM_DTYPES, Sample, Ticket
from paceline.observe.monitor.directory import JsonlReader
from paceline.observe.record.body import (
    TURN_STREAMS,
    RolloutRecord,
    ShortRolloutRecord,
    TurnTokens,
    streams_of,
    turns_of,
)
from paceline.observe.record.layout import BODY, ROW, SCHEMA, RecordFiles, count_complete_rows, map_rows
from paceline.observe.record.rows import RolloutNotFound, StoredRollout, StoredTurn, row_of

_BLOCK = 16 << 20
_NUMBERS = {"prompt_ids": "<i4", "completion_ids": "<i4", "logprobs": "<f4", "versions": "<i4", "log_z": "<f4"}
"""Fields of a turn that are arrays."""

_decoder = msgspec.msgpack.Decoder(RolloutRecord | ShortRolloutRecord)


def decode(data: bytes) -> RolloutRecord | ShortRolloutRecord:
    """The body; garbage raises `ValueError`."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a rollout: {error}") from error


def _turns(body: RolloutRecord | ShortRolloutRecord) -> list[StoredTurn]:
    """Every turn whole again."""
    turns: list[StoredTurn] = []
    for record in body.turns:
        fields = asdict(record)
        like, shared, messages = (fields.pop(name, -1) for name in ("like", "shared", "shared_messages"))
        for name, kind in _NUMBERS.items():
            if isinstance(fields[name], bytes):
                fields[name] = np.frombuffer(fields[name], kind)
            elif isinstance(fields[name], list):
                fields[name] = np.array(fields[name], kind)
        if isinstance(record.versions, int):
            fields["versions"] = np.full(len(fields["completion_ids"]), record.versions, "<i4")
        past = turns[like] if like >= 0 else None
        if past is not None:
            fields["prompt_ids"] = np.concatenate([past.full_ids[:shared], fields["prompt_ids"]])
            if messages:
                fields["messages"] = [*(past.messages or ()), past.message][:messages] + (record.messages or [])
        if isinstance(record.tools, bool):
            fields["tools"] = past.tools if past is not None and record.tools else None
        turns.append(StoredTurn(**fields))
    return turns


def _samples(body: RolloutRecord | ShortRolloutRecord, turns: Sequence[StoredTurn]) -> list[Sample]:
    """The samples as they shipped."""
    ticket = Ticket(*body.ticket)
    tokens = [TurnTokens(turn.logprobs.tobytes(), turn.versions.tobytes(), turn.temperature) for turn in turns]
    samples = []
    for record in body.samples:
        streams, length = {}, record.length
        if record.turn >= 0:
            streams["token_ids"] = turns[record.turn].full_ids[:length].astype(np.int64)
        if record.from_turns:
            expected = streams_of(length, record.spans, turns_of(record.spans, tokens, record.turn))
            for bit, name in enumerate(TURN_STREAMS):
                if expected is not None and record.from_turns >> bit & 1:
                    streams[name] = np.frombuffer(expected[bit], STREAM_DTYPES[name])
        for written, stream in record.streams.items():
            name = RENAMED_STREAMS.get(written, written)
            streams[name] = decompress_stream(stream, np.dtype(STREAM_DTYPES[name]), length, record.spans)
        facts = {name: getattr(record, name) for name in ("ended", "rollout", "spans")}
        samples.append(Sample(**streams, **facts, env=ticket.env, ticket=ticket if record.ticketed else None))
    return samples


def schema_problem(at: RecordFiles) -> str | None:
    """Why a record cannot be read, if it is another version's."""
    try:
        schema = json.loads(at.schema.read_text())["schema"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError):
        return "record/schema.json cannot be read, so the layout of record/ is unknown: restore it"
    if schema != SCHEMA:
        return f"record/ is of schema {schema!r} and this Paceline reads schema {SCHEMA}: use the version that wrote it"
    return None


class RecordView:
    """A view of the record that does not change. A reader that finds it stale makes another."""

    def __init__(self, at: RecordFiles, names: JsonlReader, before: "RecordView | None" = None) -> None:
        """With a view from `before`, only what came since is looked at."""
        self._at = at
        self._data = self._text = None
        self.identity = identity(at.index)
        self._data = _open_or_none(at.data)
        self._text = _open_or_none(at.text)
        rows = map_rows(at.index, ROW)
        lines = names.read()
        self.names = ["", *(str(line.get("name", "")) for line in lines)]
        self.kinds = ["", *(str(line.get("kind", "")) for line in lines)]
        known = len(before.rows) if before is not None and before.identity[:2] == self.identity[:2] else 0
        whole = known + count_complete_rows(rows[known:], _size(self._data), _size(self._text), len(lines))
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
            if descriptor is not None:
                os.close(descriptor)

    def read(self, index: int) -> StoredRollout:
        cells = self.rows[index]
        row = row_of(index, cells, self.names)
        if not cells["flags"] & BODY:
            return StoredRollout(row=row, ticket=Ticket(row.ticket, row.env, 0, 0, row.row), reward=row.reward)
        size = int(cells["size"])
        data = os.pread(self._data, size, int(cells["offset"])) if self._data is not None else b""
        if len(data) < size:
            raise RolloutNotFound(f"rollout {index} is no longer whole: rollouts.data was cut")
        try:
            body = decode(data)
            turns = _turns(body)
            samples = _samples(body, turns)
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            raise RolloutNotFound(f"rollout {index} cannot be read: {error}") from error
        messages = [*(turns[-1].messages or ()), turns[-1].message] if turns else []
        facts = {name: getattr(body, name) for name in ("parent", "reward", "metrics", "error")}
        return StoredRollout(
            row=row, ticket=Ticket(*body.ticket), messages=messages, turns=turns, samples=samples, **facts
        )

    def metrics_of(self, index: int) -> dict[str, Any]:
        """The environment's own metrics of a rollout, without the rest of it; none where they cannot be read."""
        cells = self.rows[index]
        if not cells["flags"] & BODY or self._data is None:
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
            if self._text is not None and 4 * int(sizes.sum()) >= end - start and hasattr(os, "posix_fadvise"):
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
        while first < count and self._text is not None:
            start = int(starts[first])
            last = max(first + 1, int(np.searchsorted(ends, start + _BLOCK, side="right")))
            gaps = np.flatnonzero(starts[first + 1 : last] - ends[first : last - 1] > _BLOCK // 64)
            if len(gaps):
                last = first + 1 + int(gaps[0])
            yield first, last, start, os.pread(self._text, int(ends[last - 1]) - start, start)
            first = last


def identity(path: Path) -> tuple[int, int, int]:
    """Which file this is, and how long."""
    try:
        status = path.stat()
        return status.st_dev, status.st_ino, status.st_size
    except OSError:
        return 0, 0, 0


def _open_or_none(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None


def _size(descriptor: int | None) -> int:
    return 0 if descriptor is None else os.fstat(descriptor).st_size
