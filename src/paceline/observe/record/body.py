"""Encodes one rollout as bytes and decodes it, in the two forms that `rollouts.data` has.

A conversation grows by repeating itself: each prompt holds all turns before it. A turn keeps only what is new, tokens
and messages alike, and says which turn it goes on from; so the record grows with what happened and not with its square.
Samples keep what their turns do not say already: credit, weights, and other models' scores.

A short rollout of one turn is written as it is: a step may hold hundreds of them, and looking for what could be left
out would cost more than it saves. Its numbers are msgpack's own, its streams bytes.
"""

import struct
from collections.abc import Sequence
from itertools import takewhile
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import asdict

from paceline.data.rollout import (
    PackedTurn,
    Rollout,
    Runs,
    Turn,
    compress_stream,
    decompress_stream,
    expand_versions,
    pack_floats,
    pack_ids,
    pack_versions,
)
from paceline.data.sample import RENAMED_STREAMS, STREAM_DTYPES, Ended, Sample, Ticket
from paceline.observe.record.layout import escape_surrogates
from paceline.observe.record.rows import StoredTurn

LOOK_BACK = 8
"""Turns that one is compared with: those of a sub-agent or two may lie in between."""
SHORT = 40
"""Tokens, prompt and reply, up to which a rollout is written in the short form."""
TURN_STREAMS = ("loss_mask", "logprobs", "versions", "temperatures")
"""Streams that the turns hold already, unless they were changed since."""
CREDIT_STREAMS = tuple(name for name in STREAM_DTYPES if name not in TURN_STREAMS and name != "token_ids")
"""Streams that come in when a rollout is judged."""
_AFTER_TOKENS = tuple(name for name in STREAM_DTYPES if name != "token_ids")
_NUMBERS = {"prompt_ids": "<i4", "completion_ids": "<i4", "logprobs": "<f4", "versions": "<i4", "log_z": "<f4"}
"""Fields of a turn that are arrays."""

DEEPEST = 60
"""Levels of nesting that are kept; a reader's own recursion ends not far below a thousand."""
_LARGEST = 2**63


def _hook(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else _text(value)


encoder = msgspec.msgpack.Encoder(enc_hook=_hook)
REFUSED = (TypeError, ValueError, OverflowError, RecursionError)
"""Errors that it raises for a value that must be sanitized first."""


def sanitize(value: Any, depth: int = DEEPEST) -> Any:
    """A copy that can be written: lone surrogates as their escapes, huge numbers and what lies too deep as text."""
    match value:
        case None | bool() | float() | bytes():
            return value
        case str():
            return escape_surrogates(value)
        case int():
            return value if -_LARGEST <= value < _LARGEST else str(value)
        case _ if depth == 0:
            return f"({type(value).__name__}, nested too deep to be kept)"
        case dict():
            return {_key(key): sanitize(item, depth - 1) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [sanitize(item, depth - 1) for item in value]
        case np.generic() | np.ndarray():
            return sanitize(value.tolist(), depth - 1)
    return escape_surrogates(_text(value))


def _key(key: Any) -> Any:
    return key if type(key) is int and -_LARGEST <= key < _LARGEST else escape_surrogates(str(key))


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # whatever a user's own object does when it is asked for its text
        return f"({type(value).__name__} that does not tell what it is: {type(error).__name__})"


class _RolloutFields(msgspec.Struct, array_like=True):
    """The fields with which both forms begin. Their order is the file's."""

    ticket: tuple[int, str, int, int, int]
    member: int
    actor: str
    kind: str
    parent: str
    reward: float | None
    metrics: dict[str, Any]
    error: str | None


class ShortTurn(msgspec.Struct, array_like=True, gc=False):
    """A turn with the fields of `Turn`. Their order is the file's."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    log_z: list[float] | None
    finish: str
    temperature: float
    recomputed: bool
    weights: dict[int, str]
    messages: list[Any] | None
    tools: list[Any] | None
    text: str
    said: Any
    seconds: float = 0.0
    started: float = 0.0
    top: list[list[tuple[int, float]]] | None = None
    queued: float = 0.0


class ShortSample(msgspec.Struct, array_like=True, gc=False):
    turn: ClassVar[int] = 0
    length: ClassVar[int] = _LARGEST
    """Its tokens are all of the turn's."""
    from_turns: ClassVar[int] = 0

    streams: dict[str, bytes]
    """Without `token_ids` where they are the turn's."""
    ended: Ended
    rollout: int
    spans: tuple[tuple[int, int], ...]
    ticketed: bool


class ShortRolloutRecord(_RolloutFields, array_like=True, tag=2, gc=False):
    """A short rollout of one turn. New fields come last, with a default."""

    turn: ShortTurn
    sample: ShortSample | None
    verdicts: list[dict[str, Any]] = []
    target: str = ""
    seconds: float = 0.0
    spans: list[tuple[str, float, float]] = []

    @property
    def turns(self) -> list[ShortTurn]:
        return [self.turn]

    @property
    def samples(self) -> list[ShortSample]:
        return [] if self.sample is None else [self.sample]


class _Turn(msgspec.Struct, array_like=True):
    like: int
    """The turn it goes on from; -1 for none."""
    shared: int
    """Tokens of that turn, prompt and completion, that its prompt begins with."""
    prompt_ids: bytes
    """The rest of the prompt."""
    completion_ids: bytes
    logprobs: bytes
    versions: int | bytes
    """One for all, or one for each."""
    log_z: bytes | None
    finish: str
    temperature: float
    recomputed: bool
    weights: dict[int, str]
    shared_messages: int
    """Messages of that turn, its reply included, that its conversation begins with."""
    messages: list[Any] | None
    """The rest of them; None for a prompt given as tokens."""
    tools: list[Any] | bool | None
    """True: those of that turn."""
    text: str
    said: Any
    seconds: float = 0.0
    started: float = 0.0
    top: list[list[tuple[int, float]]] | None = None
    queued: float = 0.0


class _Sample(msgspec.Struct, array_like=True):
    length: int
    turn: int
    """Whose prompt and completion its tokens are; -1 where they are among the streams."""
    from_turns: int
    """Which of `TURN_STREAMS` are as the turns say, a bit each."""
    streams: dict[str, bytes | Runs]
    ended: Ended
    rollout: int
    spans: tuple[tuple[int, int], ...]
    ticketed: bool


class RolloutRecord(_RolloutFields, array_like=True, tag=1):
    """A rollout of any length. New fields come last, with a default."""

    turns: list[_Turn]
    samples: list[_Sample]
    verdicts: list[dict[str, Any]] = []
    target: str = ""
    seconds: float = 0.0
    spans: list[tuple[str, float, float]] = []

    def sanitize(self) -> None:
        """Make everything that came from others something msgpack takes."""
        for name in ("ticket", "actor", "kind", "parent", "metrics", "error", "verdicts"):
            setattr(self, name, sanitize(getattr(self, name)))
        for turn in self.turns:
            for name in ("messages", "tools", "said", "text", "weights"):
                setattr(turn, name, sanitize(getattr(turn, name)))


_rollout_fields = attrgetter(*_RolloutFields.__struct_fields__)
_last_fields = attrgetter("verdicts", "target", "seconds", "spans")
"""What came to both forms later, with defaults, so that older records are read."""
_turn_fields = attrgetter(*ShortTurn.__struct_fields__)


def encode(rollout: Rollout) -> tuple[bytes, Sequence[Any]]:
    """The body, and the messages that were new in each turn."""
    if (short := _encode_short(rollout)) is not None:
        return short, rollout.turns[0].messages or ()
    long = LongEncoder(rollout)
    try:
        return encoder.encode(long.body), long.new_messages
    except REFUSED:
        long.body.sanitize()
        return encoder.encode(long.body), long.new_messages


def _encode_short(rollout: Rollout) -> bytes | None:
    """None where it is long, has several turns, or holds what msgpack does not take."""
    if len(rollout.turns) != 1 or len(rollout.samples) > 1:
        return None
    turn, kept = rollout.turns[0], None
    if len(turn.prompt_ids) + len(turn.completion_ids) > SHORT:
        return None
    for sample in rollout.samples:
        streams = {name: stream.tobytes() for name in _AFTER_TOKENS if (stream := getattr(sample, name)) is not None}
        packed, tokens = turn.packed, sample.token_ids
        whole = packed is not None and tokens is packed.made[0] and packed.end == len(tokens)
        if not whole and tokens.tolist() != [*turn.prompt_ids, *turn.completion_ids]:
            streams = {"token_ids": sample.token_ids.tobytes()} | streams
        kept = ShortSample(streams, sample.ended, sample.rollout, sample.spans, sample.ticket is not None)
    try:
        said = ShortTurn(*_turn_fields(turn))
        return encoder.encode(ShortRolloutRecord(*_rollout_fields(rollout), said, kept, *_last_fields(rollout)))
    except REFUSED:
        return None


class TurnTokens(NamedTuple):
    """Of a turn what its sample repeats, four bytes a token."""

    logprobs: bytes
    versions: int | bytes
    temperature: float


class LongEncoder:
    """Encodes a rollout of any length, without what its turns repeat."""

    def __init__(self, rollout: Rollout) -> None:
        self.new_messages: list[Any] = []
        self._full: list[bytes] = []
        self._tokens: list[TurnTokens] = []
        turns = rollout.turns
        self._only = turns[0].packed if len(turns) == 1 else None
        self.body = RolloutRecord(
            *_rollout_fields(rollout),
            [self._turn(place, turn, turns) for place, turn in enumerate(turns)],
            [self._sample(sample) for sample in rollout.samples],
            *_last_fields(rollout),
        )

    def _turn(self, place: int, turn: Turn, turns: Sequence[Turn]) -> _Turn:
        full, prompt, sampled, logprobs, versions = _token_arrays(turn)
        like, shared = self._goes_on(prompt, place) if place else (-1, 0)
        repeated, messages, tools = 0, turn.messages, turn.tools
        if like >= 0:
            past = turns[like]
            if messages and past.messages is not None:
                pairs = zip(messages, [*(past.messages or ()), past.message], strict=False)
                repeated = sum(1 for _ in takewhile(lambda pair: _is_equal(*pair), pairs))
                messages = messages[repeated:]
            if tools is not None and _is_equal(tools, past.tools):
                tools = True
        if messages:
            self.new_messages += messages
        self._full.append(full)
        self._tokens.append(TurnTokens(logprobs, versions, turn.temperature))
        numbers = sampled, logprobs, versions, None if turn.log_z is None else pack_floats(turn.log_z)
        facts = turn.finish, turn.temperature, turn.recomputed, dict(turn.weights)
        conversation = repeated, messages, tools, turn.text, turn.said
        measured = turn.seconds, turn.started, turn.top, turn.queued
        return _Turn(like, shared, prompt[4 * shared :], *numbers, *facts, *conversation, *measured)

    def _goes_on(self, prompt: bytes, place: int) -> tuple[int, int]:
        """The turn that a prompt repeats most of, the latest of them, and how many tokens of it."""
        best, most = -1, 0
        for past in range(place - 1, max(-1, place - 1 - LOOK_BACK), -1):
            common = _shared_prefix(prompt, self._full[past])
            if common > most:
                best, most = past, common
                if 4 * common == len(self._full[past]):
                    break
        return best, most

    def _sample(self, sample: Sample) -> _Sample:
        spans, length = sample.spans, len(sample.token_ids)
        if self._only is not None and is_unchanged(sample, self._only):
            turn, from_turns, streams = 0, (1 << len(TURN_STREAMS)) - 1, {}
        else:
            turn, from_turns, streams = self._compared(sample)
        for name in CREDIT_STREAMS:
            if (stream := getattr(sample, name)) is not None:
                streams[name] = compress_stream(stream, spans)
        facts = sample.ended, sample.rollout, spans, sample.ticket is not None
        return _Sample(length, turn, from_turns, streams, *facts)

    def _compared(self, sample: Sample) -> tuple[int, int, dict[str, bytes | Runs]]:
        """The turn that its tokens are, or were cut from if it is the last; what its turns say of it, and the rest."""
        spans, length = sample.spans, len(sample.token_ids)
        tokens, last = sample.token_ids.astype(np.int32).tobytes(), len(self._full) - 1
        fits = (full == tokens or (at == last and full.startswith(tokens)) for at, full in enumerate(self._full))
        turn = next((at for at, fit in enumerate(fits) if fit), -1)
        streams: dict[str, bytes | Runs] = {} if turn >= 0 else {"token_ids": compress_stream(sample.token_ids)}
        expected, from_turns = streams_of(length, spans, self._tokens, turn), 0
        for bit, name in enumerate(TURN_STREAMS):
            if (stream := getattr(sample, name)) is None:
                continue
            if expected is not None and stream.tobytes() == expected[bit]:
                from_turns |= 1 << bit
            else:
                streams[name] = compress_stream(stream)
        return turn, from_turns, streams


def _token_arrays(turn: Turn) -> tuple[bytes, bytes, bytes, bytes, int | bytes]:
    """All tokens, those of the prompt and of the completion, log probabilities and versions."""
    if (packed := turn.packed) is None:
        prompt, sampled = pack_ids(turn.prompt_ids), pack_ids(turn.completion_ids)
        return prompt + sampled, prompt, sampled, pack_floats(turn.logprobs), pack_versions(turn.versions)
    tokens, start, end = packed.tokens, 4 * packed.start, 4 * packed.end
    return tokens[:end], tokens[:start], tokens[start:end], packed.logprobs, packed.versions


def _shared_prefix(one: bytes, other: bytes) -> int:
    """How many tokens both begin with."""
    shorter = min(len(one), len(other)) // 4
    if one[: 4 * shorter] == other[: 4 * shorter]:
        return shorter
    return int(np.argmax(np.frombuffer(one, "<i4")[:shorter] != np.frombuffer(other, "<i4")[:shorter]))


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # values of a user's own, which need not be comparable
        return False


def is_unchanged(sample: Sample, turn: PackedTurn) -> bool:
    """Whether a sample of this turn alone has its `TURN_STREAMS` as they were assembled. Of those that can be written
    into the bytes are compared."""
    start, end = turn.start, turn.end
    said = end - start
    return (
        sample.token_ids is turn.made[0]
        and sample.logprobs is turn.made[1]
        and sample.temperatures is turn.made[2]
        and sample.spans == ((start, end),)
        and len(turn.logprobs) == 4 * said
        and sample.loss_mask.tobytes() == bytes(start) + b"\1" * said
        and sample.versions.tobytes() == b"\xff" * (4 * start) + expand_versions(turn.versions, said)
    )


def streams_of(
    length: int, spans: Sequence[tuple[int, int]], turns: Sequence[TurnTokens], turn: int
) -> tuple[bytes, bytes, bytes, bytes] | None:
    """`TURN_STREAMS` as the assembly of a sample makes them of all turns, a span each, or of the one turn that it ends
    with; None where the turns do not fit."""
    if len(spans) != len(turns):
        turns = [turns[turn]] if len(spans) == 1 and turn >= 0 else []
    if not turns:
        return None
    mask, logprobs = bytearray(length), bytearray(4 * length)
    versions, temperatures = bytearray(b"\xff" * (4 * length)), bytearray(_ONE * length)
    place = 0
    for (start, end), said in zip(spans, turns, strict=True):
        count, here = end - start, slice(4 * start, 4 * end)
        if not place <= start <= end <= length or len(said.logprobs) < 4 * count:
            return None
        mask[start:end] = b"\1" * count
        logprobs[here] = said.logprobs[: 4 * count]
        versions[here] = expand_versions(said.versions, count)[: 4 * count]
        temperatures[here] = _float(said.temperature or 1.0) * count
        place = end
    return bytes(mask), bytes(logprobs), bytes(versions), bytes(temperatures)


_float = struct.Struct("<f").pack
_ONE = _float(1.0)
_decoder = msgspec.msgpack.Decoder(RolloutRecord | ShortRolloutRecord)


def decode(data: bytes) -> RolloutRecord | ShortRolloutRecord:
    """The body; garbage raises `ValueError`."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a rollout: {error}") from error


def decode_turns(body: RolloutRecord | ShortRolloutRecord) -> list[StoredTurn]:
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


def decode_samples(body: RolloutRecord | ShortRolloutRecord, turns: Sequence[StoredTurn]) -> list[Sample]:
    """The samples as they shipped."""
    ticket = Ticket(*body.ticket)
    tokens = [TurnTokens(turn.logprobs.tobytes(), turn.versions.tobytes(), turn.temperature) for turn in turns]
    samples = []
    for record in body.samples:
        streams, length = {}, record.length
        if record.turn >= 0:
            streams["token_ids"] = turns[record.turn].full_ids[:length].astype(np.int64)
        if record.from_turns:
            expected = streams_of(length, record.spans, tokens, record.turn)
            for bit, name in enumerate(TURN_STREAMS):
                if expected is not None and record.from_turns >> bit & 1:
                    streams[name] = np.frombuffer(expected[bit], STREAM_DTYPES[name])
        for written, stream in record.streams.items():
            name = RENAMED_STREAMS.get(written, written)
            streams[name] = decompress_stream(stream, np.dtype(STREAM_DTYPES[name]), length, record.spans)
        facts = {name: getattr(record, name) for name in ("ended", "rollout", "spans")}
        samples.append(Sample(**streams, **facts, env=ticket.env, ticket=ticket if record.ticketed else None))
    return samples
