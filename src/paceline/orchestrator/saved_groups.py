"""Writes the finished groups that a run still needs into its checkpoint, and reads them again.

A finished group is sampled, credited and counted; to play it again after a resume would count it twice with every
baseline that saw it, and would not give the same tokens. So the file keeps it whole: exact turns, rewards, and the
samples with all their streams, as msgpack with raw array buffers. What has no place there (a message that holds an
object of the user's own) keeps its group out of the file, and its ticket waits again.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import asdict

from paceline.data import Ticket, WireError
from paceline.data.sample import WiredArray, WiredSample, unwire, wire
from paceline.engine import Finish
from paceline.orchestrator.checkpoint import CheckpointError
from paceline.rollout import Group, Rollout, Turn

GROUPS_FILE = "groups.msgpack"
GROUPS_VERSION = 1


@dataclass(slots=True)
class DispatcherState:
    """Everything between a landed group and the batch it trains in."""

    buffered: list[Group] = field(default_factory=list)
    """Finished, not yet shipped."""
    resolved: list[Group] = field(default_factory=list)
    """Finished, not yet reported to curriculum and metrics: buffered ones, and dropped ones that came early."""
    remembered: list[tuple[Group, int]] = field(default_factory=list)
    """The memory of replay, newest first, with how often each may still train."""
    chosen: list[Group] = field(default_factory=list)
    """Of those, what the batch being filled replays."""
    counts: dict[str, Any] = field(default_factory=dict)


class _BufferedTurn(msgspec.Struct, array_like=True):
    prompt_ids: WiredArray
    completion_ids: WiredArray
    logprobs: WiredArray
    versions: WiredArray
    log_z: WiredArray | None
    finish: Finish
    temperature: float
    recomputed: bool
    messages: list[dict] | None
    tools: list[dict] | None
    text: str
    said: dict | None
    weights: dict[int, str] = {}
    """Not in files of earlier versions, as what follows it."""
    seconds: float = 0.0
    started: float = 0.0
    top: list[list[tuple[int, float]]] | None = None
    queued: float = 0.0


class _Rollout(msgspec.Struct, array_like=True):
    member: int
    actor: str
    kind: str
    parent: str
    turns: list[_BufferedTurn]
    reward: float | None
    metrics: dict[str, float]
    error: str | None
    dropped: bool
    samples: list[WiredSample]
    verdicts: list[dict[str, Any]] = []
    """Not in files of earlier versions, as what follows it."""
    target: str = ""
    seconds: float = 0.0
    spans: list[tuple[str, float, float]] = []


class _Group(msgspec.Struct, array_like=True):
    ticket: tuple[int, str, int, int, int]
    size: int
    rollouts: list[_Rollout]
    failed: list[_Rollout]


class _GroupsFile(msgspec.Struct, array_like=True):
    """Each group once; the lists hold indices into `groups`."""

    version: int
    groups: list[msgspec.Raw]
    buffered: list[int]
    resolved: list[int]
    remembered: list[tuple[int, int]]
    chosen: list[int]
    counts: dict[str, Any]


def _plain(value: Any) -> Any:
    """numpy's numbers and arrays as msgpack has them."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} has no place in a file")


_NUMBERS: dict[str, type] = {
    **dict.fromkeys(("prompt_ids", "completion_ids", "versions"), np.int64),
    **dict.fromkeys(("logprobs", "log_z"), np.float64),
}
_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_group_decoder = msgspec.msgpack.Decoder(_Group)
_decoder = msgspec.msgpack.Decoder(_GroupsFile)


def encode_groups(held: DispatcherState) -> bytes:
    """The file. Groups that cannot be written are nowhere in it."""
    known: dict[int, int] = {}
    raws: list[msgspec.Raw] = []
    for group in [*held.buffered, *held.resolved, *(g for g, _ in held.remembered), *held.chosen]:
        if id(group) not in known:
            with contextlib.suppress(TypeError, ValueError, OverflowError, NotImplementedError, RecursionError):
                wired = _Group(tuple(group.ticket), group.size, _wired(group.rollouts), _wired(group.failed))
                raws.append(msgspec.Raw(_encoder.encode(wired)))
                known[id(group)] = len(raws) - 1

    def at(groups: Sequence[Group]) -> list[int]:
        return [known[id(group)] for group in groups if id(group) in known]

    remembered = [(known[id(group)], left) for group, left in held.remembered if id(group) in known]
    lists = at(held.buffered), at(held.resolved), remembered, at(held.chosen)
    return _encoder.encode(_GroupsFile(GROUPS_VERSION, raws, *lists, dict(held.counts)))


def decode_groups(data: bytes) -> DispatcherState:
    """The groups again; a group held in two places is one object again. One that was written but is no group (a
    user's code put something odd into it) is left out like one that could not be written. Garbage raises `WireError`.
    """
    try:
        held = _decoder.decode(data)
        if held.version != GROUPS_VERSION:
            raise WireError(f"groups of version {held.version} cannot be read by version {GROUPS_VERSION}")
        groups = [_read(raw) for raw in held.groups]
        lists = (
            [group for at in some if (group := groups[at])] for some in (held.buffered, held.resolved, held.chosen)
        )
        buffered, resolved, chosen = lists
        remembered = [(group, left) for at, left in held.remembered if (group := groups[at])]
        return DispatcherState(buffered, resolved, remembered, chosen, held.counts)
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError, LookupError) as error:
        raise WireError(f"not a checkpoint's groups: {error}") from error


def read_groups(checkpoint: Path) -> DispatcherState:
    """The groups of a checkpoint's folder; none if it is older than this file."""
    path = checkpoint / GROUPS_FILE
    if not path.is_file():
        return DispatcherState()
    try:
        return decode_groups(path.read_bytes())
    except (OSError, WireError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}): resume from an older checkpoint, or remove the file and its finished "
            "groups are played again"
        ) from error


def _read(raw: msgspec.Raw) -> Group | None:
    try:
        wired = _group_decoder.decode(raw)
        ticket = Ticket(*wired.ticket)
        rollouts, failed = ([_rollout(r, ticket) for r in some] for some in (wired.rollouts, wired.failed))
        return Group(ticket=ticket, rollouts=rollouts, size=wired.size, failed=failed)
    except (msgspec.ValidationError, TypeError, ValueError):
        return None


def _wired(rollouts: Iterable[Rollout]) -> list[_Rollout]:
    wired = []
    for rollout in rollouts:
        fields = _fields(rollout, _Rollout)
        fields["turns"], fields["samples"] = list(map(_wired_turn, rollout.turns)), list(map(wire, rollout.samples))
        wired.append(_Rollout(**fields))
    return wired


def _wired_turn(turn: Turn) -> _BufferedTurn:
    """The arrays are as wide as Python's own numbers, so that none changes."""
    fields = _fields(turn, _BufferedTurn)
    fields["weights"] = dict(turn.weights)
    for name, kind in _NUMBERS.items():
        if fields[name] is not None:
            fields[name] = WiredArray.of(np.asarray(fields[name], dtype=kind))
    return _BufferedTurn(**fields)


def _fields(value: Rollout | Turn, struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in struct.__struct_fields__}


def _rollout(wired: _Rollout, ticket: Ticket) -> Rollout:
    fields = asdict(wired)
    fields["turns"], fields["samples"] = list(map(_turn, wired.turns)), list(map(unwire, wired.samples))
    return Rollout(ticket=ticket, **fields)


def _turn(wired: _BufferedTurn) -> Turn:
    fields = asdict(wired)
    for name, kind in _NUMBERS.items():
        if (array := fields[name]) is not None:
            if array.dtype != (expected := np.dtype(kind).str):
                raise WireError(f"a turn's numbers have dtype {array.dtype}, not {expected}")
            fields[name] = array.view().tolist()
    return Turn(**fields)
