"""Encodes one rollout as bytes.

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
from paceline.data.streams import Packed, Runs, each, floats, ids, one_or_each, squeeze
from paceline.observe.record.lines import REFUSED, encoder, tamed

LOOK_BACK = 8
"""Turns that one is compared with: those of a sub-agent or two may lie in between."""
SAID = ("loss_mask", "logprobs", "versions", "temperatures")
"""Streams that the turns hold already, unless they were changed since."""
ALL_SAID = (1 << len(SAID)) - 1
LATER = tuple(name for name in STREAM_DTYPES if name not in SAID and name != "token_ids")
"""Streams that come in when a rollout is judged."""


class TurnLike(Protocol):
    """The attributes of a turn that are read, as `paceline.rollout.Turn` has it."""

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
    packed: Packed | None


class RolloutLike(Protocol):
    """The attributes of a rollout that are read, as `paceline.rollout.Rollout` has it."""

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


class RolloutRecord(msgspec.Struct, array_like=True, tag=1):
    """A rollout as `rollouts.data` holds it. New fields come last, with a default."""

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


class TurnTokens(NamedTuple):
    """Of a turn what its sample repeats, four bytes a token."""

    logprobs: bytes
    versions: int | bytes
    temperature: float


class Written:
    """A rollout on its way to the file: the body, and the messages that were new in each turn."""

    def __init__(self, rollout: RolloutLike) -> None:
        self.new: list[Any] = []
        self._full: list[bytes] = []
        self._heard: list[TurnTokens] = []
        turns: list[TurnLike] = rollout.turns
        self._only = turns[0].packed if len(turns) == 1 else None
        self.body = RolloutRecord(
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
        full, prompt, sampled, logprobs, versions = _numbers(turn)
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
        self._full.append(full)
        self._heard.append(TurnTokens(logprobs, versions, turn.temperature))
        return _Turn(
            like,
            shared,
            prompt[4 * shared :],
            sampled,
            logprobs,
            versions,
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
        if self._only is not None and as_made(sample, self._only):
            turn, said, streams = 0, ALL_SAID, {}
        else:
            turn, said, streams = self._compared(sample)
        for name in LATER:
            if (stream := getattr(sample, name)) is not None:
                streams[name] = squeeze(stream, spans)
        return _Sample(length, turn, said, streams, sample.ended, sample.rollout, spans, sample.ticket is not None)

    def _compared(self, sample: Sample) -> tuple[int, int, dict[str, bytes | Runs]]:
        """The turn that holds its tokens, what its turns say of it, and the rest of that."""
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
        return turn, said, streams

    def _holder(self, tokens: bytes) -> int:
        """The turn whose prompt and completion these are, or that they were cut from."""
        for at, full in enumerate(self._full):
            if len(full) == len(tokens) and full == tokens:
                return at
        return len(self._full) - 1 if self._full and self._full[-1].startswith(tokens) else -1


def _numbers(turn: TurnLike) -> tuple[bytes, bytes, bytes, bytes, int | bytes]:
    """All tokens, those of the prompt and of the completion, log probabilities and versions."""
    if (packed := turn.packed) is None:
        prompt, sampled = ids(turn.prompt_ids), ids(turn.completion_ids)
        return prompt + sampled, prompt, sampled, floats(turn.logprobs), one_or_each(turn.versions)
    tokens, start, end = packed.tokens, 4 * packed.start, 4 * packed.end
    return tokens[:end], tokens[:start], tokens[start:end], packed.logprobs, packed.versions


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


def as_made(sample: Sample, turn: Packed) -> bool:
    """Whether a sample of this turn alone has the streams of `SAID` as they were assembled. Of those that can be
    written into the bytes are compared."""
    start, end = turn.start, turn.end
    said = end - start
    return (
        sample.token_ids is turn.made[0]
        and sample.logprobs is turn.made[1]
        and sample.temperatures is turn.made[2]
        and sample.spans == ((start, end),)
        and len(turn.logprobs) == 4 * said
        and sample.loss_mask.tobytes() == bytes(start) + b"\1" * said
        and sample.versions.tobytes() == b"\xff" * (4 * start) + each(turn.versions, said)
    )


def spoken(spans: Sequence[tuple[int, int]], turns: Sequence[Any], turn: int) -> list[Any]:
    """The turns that a sample's spans are: all of them, or the one it ends with."""
    if len(spans) == len(turns):
        return list(turns)
    return [turns[turn]] if len(spans) == 1 and turn >= 0 else []


def as_said(
    length: int, spans: Sequence[tuple[int, int]], turns: Sequence[TurnTokens]
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
            b"\xff" * (4 * start) + each(turn.versions, said)[: 4 * said] + b"\xff" * (4 * rest),
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
        versions += b"\xff" * (4 * gap), each(turn.versions, count)[: 4 * count]
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
