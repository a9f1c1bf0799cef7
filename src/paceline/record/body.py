"""One rollout as bytes, and back.

A conversation grows by repeating itself: each prompt holds all turns before it. A turn keeps only what is new, tokens
and messages alike, and says which turn it goes on from; so the record grows with what happened and not with its square.
Samples keep what their turns do not say already: credit, weights, and other models' scores.
"""

import struct
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from paceline.data.sample import STREAM_DTYPES, Ended, Sample, Ticket
from paceline.record.odd import REFUSED, encoder, tamed
from paceline.record.streams import Runs, floats, ids, squeeze

LOOK_BACK = 8
"""Turns that one is compared with: those of a sub-agent or two may lie in between."""
SAID = ("loss_mask", "logprobs", "versions", "temperatures")
"""Streams that the turns say already, where nobody has changed them since."""
LATER = tuple(name for name in STREAM_DTYPES if name not in SAID and name != "token_ids")
"""Streams that come in when a rollout is judged."""


class TurnLike(Protocol):
    """What is read of a turn, as `paceline.rollout.Turn` has it."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish: str
    temperature: float
    log_z: Sequence[float] | None
    recomputed: bool
    weights: Mapping[int, str]
    messages: list[dict] | None
    tools: list[dict] | None
    text: str
    said: dict | None


class RolloutLike(Protocol):
    """What is read of a rollout, as `paceline.rollout.Rollout` has it."""

    ticket: Ticket
    member: int
    actor: str
    kind: str
    parent: str
    turns: list[Any]
    reward: float | None
    metrics: dict[str, float]
    error: str | None
    dropped: bool
    samples: list[Sample]


class _Turn(msgspec.Struct, array_like=True):
    like: int
    """The turn it goes on from; -1 for none."""
    shared: int
    """Tokens of that turn, prompt and completion, that its prompt begins with."""
    prompt: bytes
    """The rest of the prompt."""
    sampled: bytes
    logprobs: bytes
    versions: int | bytes
    """One for all, or one for each."""
    log_z: bytes | None
    finish: str
    temperature: float
    recomputed: bool
    weights: dict[int, str]
    kept: int
    """Messages of that turn, its reply included, that its conversation begins with."""
    messages: list[Any] | None
    """The rest of them; None for a prompt given as tokens."""
    tools: list[Any] | bool | None
    """True: those of that turn."""
    text: str
    said: Any


class _Sample(msgspec.Struct, array_like=True):
    length: int
    turn: int
    """Whose prompt and completion its tokens are; -1 where they are among the streams."""
    said: int
    """Which of `SAID` are as the turns say, a bit each."""
    streams: dict[str, bytes | Runs]
    ended: Ended
    rollout: int
    spans: tuple[tuple[int, int], ...]
    ticketed: bool


class Body(msgspec.Struct, array_like=True, tag=1):
    """What `rollouts.data` holds of a rollout. New fields come last, with a default."""

    ticket: tuple[int, str, int, int, int]
    member: int
    actor: str
    kind: str
    parent: str
    reward: float | None
    metrics: dict[str, Any]
    error: str | None
    turns: list[_Turn]
    samples: list[_Sample]

    def tame(self) -> None:
        """Make everything that came from others something msgpack takes."""
        self.ticket = tamed(self.ticket)
        self.actor, self.kind, self.parent = tamed(self.actor), tamed(self.kind), tamed(self.parent)
        self.metrics, self.error = tamed(self.metrics), tamed(self.error)
        for turn in self.turns:
            turn.messages, turn.tools, turn.said = tamed(turn.messages), tamed(turn.tools), tamed(turn.said)
            turn.text, turn.weights = tamed(turn.text), tamed(turn.weights)


class Heard(NamedTuple):
    """Of a turn what its sample repeats, four bytes a token."""

    logprobs: bytes
    versions: bytes
    temperature: float


class Written:
    """A rollout on its way to the file: the body, and the messages that were new in each turn."""

    def __init__(self, rollout: RolloutLike) -> None:
        self.new: list[Any] = []
        self._full: list[bytes] = []
        self._heard: list[Heard] = []
        turns: list[TurnLike] = rollout.turns
        self.body = Body(
            tuple(rollout.ticket),
            rollout.member,
            rollout.actor,
            rollout.kind,
            rollout.parent,
            rollout.reward,
            rollout.metrics,
            rollout.error,
            [self._turn(place, turn, turns) for place, turn in enumerate(turns)],
            [self._sample(sample) for sample in rollout.samples],
        )

    def encode(self) -> bytes:
        try:
            return encoder.encode(self.body)
        except REFUSED:
            self.body.tame()
            return encoder.encode(self.body)

    def _turn(self, place: int, turn: TurnLike, turns: Sequence[TurnLike]) -> _Turn:
        prompt, sampled = ids(turn.prompt_ids), ids(turn.completion_ids)
        like, shared = self._goes_on(prompt, place) if place else (-1, 0)
        kept, messages, tools = 0, turn.messages, turn.tools
        if like >= 0:
            past = turns[like]
            if messages and past.messages is not None:
                kept = _same(messages, past)
                messages = messages[kept:]
            if tools is not None and _equal(tools, past.tools):
                tools = True
        if messages:
            self.new += messages
        self._full.append(prompt + sampled)
        versions = turn.versions
        one = bool(versions) and versions.count(versions[0]) == len(versions)
        logprobs, numbers = floats(turn.logprobs), ids(versions)
        self._heard.append(Heard(logprobs, numbers, turn.temperature))
        return _Turn(
            like,
            shared,
            prompt[4 * shared :],
            sampled,
            logprobs,
            versions[0] if one else numbers,
            None if turn.log_z is None else floats(turn.log_z),
            turn.finish,
            turn.temperature,
            turn.recomputed,
            dict(turn.weights),
            kept,
            messages,
            tools,
            turn.text,
            turn.said,
        )

    def _goes_on(self, prompt: bytes, place: int) -> tuple[int, int]:
        """The turn that a prompt repeats most of, the latest of them, and how many tokens of it."""
        best, most = -1, 0
        for past in range(place - 1, max(-1, place - 1 - LOOK_BACK), -1):
            common = _common(prompt, self._full[past])
            if common > most:
                best, most = past, common
                if 4 * common == len(self._full[past]):
                    break
        return best, most

    def _sample(self, sample: Sample) -> _Sample:
        spans, length = sample.spans, len(sample.token_ids)
        turn = self._holder(sample.token_ids.astype(np.int32).tobytes())
        streams: dict[str, bytes | Runs] = {} if turn >= 0 else {"token_ids": squeeze(sample.token_ids)}
        expected, said = as_said(length, spans, spoken(spans, self._heard, turn)), 0
        for bit, name in enumerate(SAID):
            if (stream := getattr(sample, name)) is None:
                continue
            if expected is not None and stream.tobytes() == expected[bit]:
                said |= 1 << bit
            else:
                streams[name] = squeeze(stream)
        for name in LATER:
            if (stream := getattr(sample, name)) is not None:
                streams[name] = squeeze(stream, spans)
        return _Sample(length, turn, said, streams, sample.ended, sample.rollout, spans, sample.ticket is not None)

    def _holder(self, tokens: bytes) -> int:
        """The turn whose prompt and completion these are, or that they were cut from."""
        for at, full in enumerate(self._full):
            if len(full) == len(tokens) and full == tokens:
                return at
        return len(self._full) - 1 if self._full and self._full[-1].startswith(tokens) else -1


def _common(one: bytes, other: bytes) -> int:
    """How many tokens both begin with."""
    shorter = min(len(one), len(other)) // 4
    if one[: 4 * shorter] == other[: 4 * shorter]:
        return shorter
    return int(np.argmax(np.frombuffer(one, "<i4")[:shorter] != np.frombuffer(other, "<i4")[:shorter]))


def _same(messages: Sequence[Any], past: TurnLike) -> int:
    """How many messages of a conversation are those of an earlier turn and its reply."""
    said = past.said or {"role": "assistant", "content": past.text}
    pairs = zip(messages, [*(past.messages or ()), said], strict=False)
    return sum(1 for _ in takewhile(lambda pair: _equal(*pair), pairs))


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # values of a user's own, which need not be comparable
        return False


def spoken(spans: Sequence[tuple[int, int]], turns: Sequence[Any], turn: int) -> list[Any]:
    """The turns that a sample's spans are: all of them, or the one it ends with."""
    if len(spans) == len(turns):
        return list(turns)
    return [turns[turn]] if len(spans) == 1 and turn >= 0 else []


def as_said(
    length: int, spans: Sequence[tuple[int, int]], turns: Sequence[Heard]
) -> tuple[bytes, bytes, bytes, bytes] | None:
    """The streams of `SAID` as the assembly of a sample makes them of its turns; None where the turns do not fit."""
    if len(spans) == len(turns) == 1:  # most are: the long way round would be half of all that writing costs
        (start, end), turn = spans[0], turns[0]
        said, rest = end - start, length - end
        if said < 0 or rest < 0 or len(turn.logprobs) < 4 * said:
            return None
        return (
            bytes(start) + b"\1" * said + bytes(rest),
            bytes(4 * start) + turn.logprobs[: 4 * said] + bytes(4 * rest),
            b"\xff" * (4 * start) + turn.versions[: 4 * said] + b"\xff" * (4 * rest),
            _ONE * start + _float(turn.temperature or 1.0) * said + _ONE * rest,
        )
    mask, logprobs, versions, temperatures = [], [], [], []
    place = 0
    for (start, end), turn in zip(spans, turns, strict=False):
        gap, count = start - place, end - start
        if gap < 0 or not 0 <= 4 * count <= len(turn.logprobs):
            return None
        mask += bytes(gap), b"\1" * count
        logprobs += bytes(4 * gap), turn.logprobs[: 4 * count]
        versions += b"\xff" * (4 * gap), turn.versions[: 4 * count]
        temperatures += _ONE * gap, _float(turn.temperature or 1.0) * count
        place = end
    rest = length - place
    if not turns or rest < 0:
        return None
    mask.append(bytes(rest))
    logprobs.append(bytes(4 * rest))
    versions.append(b"\xff" * (4 * rest))
    temperatures.append(_ONE * rest)
    return b"".join(mask), b"".join(logprobs), b"".join(versions), b"".join(temperatures)


_float = struct.Struct("<f").pack
_ONE = _float(1.0)
