"""Defines the results of episodes: turns, rollouts, groups; and packs their numbers into few bytes.

A stream of a sample is kept as its bytes, or as runs of equal values where that is much shorter: most streams say the
same of thousands of tokens in a row.
"""

import copy
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.sample import Sample, Ticket
from paceline.util.lazy_import import renamed_attributes

Message = dict
Tools = Sequence[dict[str, Any]]

_IMMUTABLE = {str, int, float, bool, type(None)}


def is_text(message: Message) -> bool:
    """Whether a message is a role and a text, as most are."""
    return len(message) == 2 and type(message.get("role")) is str and type(message.get("content")) is str


def copy_message(message: Message) -> Message:
    """A copy of a message, which later changes of the original do not reach."""
    if is_text(message):
        return dict(message)
    return {key: value if type(value) is str else copy_value(value) for key, value in message.items()}


def copy_value(value: Any) -> Any:
    """A copy all the way down. What is as in JSON takes a way that is shorter than that of any object."""
    kind = type(value)
    if kind is dict:
        return {key: item if type(item) in _IMMUTABLE else copy_value(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in _IMMUTABLE else copy_value(item) for item in value]
    return value if kind in _IMMUTABLE else copy.deepcopy(value)


def message_text(message: Message) -> str:
    """The text of a message's content, also when it comes in parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


class PackedTurn(NamedTuple):
    """The numbers of a turn, four bytes each, as the assembly of its sample made them anyway: to read the lists, which
    hold an object a number, a second time would cost more than all other writing."""

    tokens: bytes
    """Of the sample it is part of: its prompt, what it said, and what came later."""
    start: int
    end: int
    logprobs: bytes
    versions: int | bytes
    made: tuple[NDArray, NDArray, NDArray]
    """Token ids, log probabilities and temperatures of the sample. They are read-only: a sample that has them
    still has what was sampled."""


class _Packing:
    """Room for what is no field: neither compared nor copied nor written down."""

    __slots__ = ("_packed",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(_Packing):
    """One engine call, exactly as it happened."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Literal["stop", "length"]
    temperature: float
    log_z: list[float] | None = None
    recomputed: bool = False
    weights: Mapping[int, str] = field(default_factory=dict)
    """Fingerprint of what the engine really held, for each version in `versions`."""
    messages: list[Message] | None = None
    """The conversation the prompt was rendered from; None for a prompt given as tokens."""
    tools: list[dict] | None = None
    text: str = ""
    """The sampled text, without the end-of-turn token."""
    said: Message | None = None
    """The message it was handed on as, if that is not simply the text: with tool calls read out of it."""
    seconds: float = field(default=0.0, compare=False)
    """From the call to its last token, queueing included; 0 where it was not measured."""
    started: float = field(default=0.0, compare=False)
    """Seconds from the start of the episode to the call."""
    top: list[list[tuple[int, float]]] | None = field(default=None, compare=False)
    """The most likely tokens at each place with their log probabilities; None unless `record.top_logprobs` asks."""
    queued: float = field(default=0.0, compare=False)
    """Seconds of the call that it waited in the engine for its first step."""

    @classmethod
    def unsampled(cls, prompt_ids: list[int], completion_ids: list[int], **more: Any) -> "Turn":
        """A turn that no engine sampled: log probabilities and versions are placeholders."""
        n = len(completion_ids)
        fields: dict[str, Any] = {"finish": "stop", "temperature": 1.0, **more}
        return cls(prompt_ids=prompt_ids, completion_ids=completion_ids, logprobs=[0.0] * n, versions=[0] * n, **fields)

    @property
    def message(self) -> Message:
        return self.said or {"role": "assistant", "content": self.text}

    @property
    def packed(self) -> PackedTurn | None:
        """Its numbers as bytes, once it is part of a sample; a copy of this turn has none."""
        return getattr(self, "_packed", None)

    def pack(self, packed: PackedTurn) -> None:
        """Keep these bytes, which say what the lists say: those must not change from now on."""
        object.__setattr__(self, "_packed", packed)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeVerdict:
    """A part of a rollout's reward that a judge gave, or the environment itself where judges grade beside it."""

    judge: str
    """Its name; `task` for the environment's own reward."""
    score: float
    """From 0 to 1 by the judge's scale; the environment's own is as it came."""
    weight: float
    """Its factor in the reward."""
    value: float
    """The grade as it was read."""
    text: str = ""
    """The judge's answer, its thoughts included."""
    model: str = ""
    seconds: float = 0.0
    """Until it answered."""
    attempts: int = 1
    """Answers until a grade could be read."""
    cached: bool = False
    """Remembered from an earlier question that was the same."""


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One actor's turns in one episode."""

    ticket: Ticket
    member: int
    """Which try of its group it is, from 0."""
    actor: str = "policy"
    kind: str = ""
    """The kind of episode, where an environment plays several."""
    parent: str = ""
    """The seat whose episode started this one, inside the same draw; empty at the root."""
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    dropped: bool = False
    """The environment gave this draw up on purpose: no failure, and no rollout either."""
    cause: BaseException | None = field(default=None, repr=False, compare=False)
    """The exception, where the episode failed with one in this process. Never written down."""
    samples: list[Sample] = field(default_factory=list)
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    """The parts of its reward, where judges grade: the fields of a `JudgeVerdict` each."""
    target: str = ""
    """The answer that its row expects, for readers of the record; empty where the row has none."""
    seconds: float = field(default=0.0, compare=False)
    """From the start of its episode until its reward was known, further tries included; 0 where it was not measured."""
    spans: list[tuple[str, float, float]] = field(default_factory=list, compare=False)
    """What its episode waited for besides the engine (`util.episode_spans`): kind, start in the episode, seconds."""

    @property
    def env(self) -> str:
        return self.ticket.env

    @property
    def completion_length(self) -> int:
        return sum(len(turn.completion_ids) for turn in self.turns)

    @property
    def trajectory_length(self) -> int:
        """Tokens of the longest prompt with its completion."""
        return max((len(t.prompt_ids) + len(t.completion_ids) for t in self.turns), default=0)

    @property
    def truncated(self) -> bool:
        return bool(self.turns) and self.turns[-1].finish == "length"

    def record(self) -> dict:
        conversation = list(self.turns[-1].messages or []) if self.turns else []
        return {
            "env": self.env,
            "ticket": self.ticket.number,
            "row": self.ticket.row,
            "member": self.member,
            "actor": self.actor,
            "reward": self.reward,
            "metrics": self.metrics,
            "error": self.error,
            "messages": [*conversation, *(turn.message for turn in self.turns[-1:])],
            "tokens": self.completion_length,
            "versions": sorted({v for t in self.turns for v in t.versions}),
            # Pairs: after a roll-back one version may stand for two sets of weights in one rollout.
            "weights": sorted({pair for t in self.turns for pair in t.weights.items()}),
            "finish": self.turns[-1].finish if self.turns else None,
        } | {name: value for name in ("verdicts", "target") if (value := getattr(self, name))}


@dataclass(slots=True, kw_only=True)
class Group:
    """Rollouts of one ticket that finished: those of one actor are compared with one another."""

    ticket: Ticket
    rollouts: list[Rollout]
    size: int
    """Episodes it was started with, and the slots it takes in a batch however many survive."""
    failed: Sequence[Rollout] = ()

    if not TYPE_CHECKING:
        __getattr__ = renamed_attributes({"places": "size", "members": "episodes_left"})

    @property
    def episodes_left(self) -> int:
        """Episodes of which at least one actor's rollout is here."""
        return len({rollout.member for rollout in self.rollouts})

    def by_actor(self) -> dict[tuple[str, str], list[Rollout]]:
        """The rollouts that are compared with one another: of one actor in one kind of episode."""
        actors: dict[tuple[str, str], list[Rollout]] = {}
        for rollout in self.rollouts:
            actors.setdefault((rollout.kind, rollout.actor), []).append(rollout)
        return actors

    def samples(self) -> list[Sample]:
        return [sample for rollout in self.rollouts for sample in rollout.samples]


def total_size(groups: Iterable[Group]) -> int:
    """Places that the groups take in a batch."""
    return sum(group.size for group in groups)


def groups_that_fit(groups: Iterable[Group], room: int) -> list[Group]:
    """Those that still fit into so many slots, in their order."""
    chosen = []
    for group in groups:
        if group.size <= room:
            chosen.append(group)
            room -= group.size
    return chosen


_INT = struct.Struct("i")
SHORT = 16
"""Tokens up to which `compress_stream` does not look for runs."""

Runs = tuple[bytes, bytes]
"""The value of each run, and where it ends; without ends, the one value of all that was said."""
Spans = Sequence[tuple[int, int]]


def pack_ids(values: Sequence[int]) -> bytes:
    """Token ids, four bytes each; raises `OverflowError` where they need more."""
    return _pack("i", values)


def pack_floats(values: Sequence[float]) -> bytes:
    return _pack("f", values)


def all_equal(versions: Sequence[int]) -> bool:
    """Whether one version sampled all tokens, as nearly always."""
    return bool(versions) and versions.count(versions[0]) == len(versions)


def pack_versions(versions: Sequence[int]) -> int | bytes:
    """The version of all tokens, or that of each. Raises as `pack_ids` does."""
    if all_equal(versions):
        try:
            _INT.pack(versions[0])
            return versions[0]
        except struct.error:
            return pack_ids(versions)
    return pack_ids(versions)


def expand_versions(versions: int | bytes, count: int) -> bytes:
    return versions if isinstance(versions, bytes) else _INT.pack(versions) * count


def _pack(kind: str, values: Sequence[float]) -> bytes:
    try:
        return struct.Struct(f"{len(values)}{kind}").pack(*values)
    except struct.error:  # an array takes twice as long, but tells what is wrong
        return array(kind, values).tobytes()


def compress_stream(stream: NDArray, spans: Spans = ()) -> bytes | Runs:
    """Bitwise: two NaNs of different bits are different values, and come back as they were. Credit is mostly one value
    for all that was said and zero elsewhere: that is kept as the value alone."""
    length, data = len(stream), stream.tobytes()
    if spans and stream.itemsize == 4:
        value = data[4 * spans[0][0] : 4 * spans[0][0] + 4]
        if len(value) == 4 and fill_spans(value, length, spans) == data:
            return value, b""
    if length <= SHORT:
        return data
    bits = stream.view(f"u{stream.itemsize}")
    changes = (bits[1:] != bits[:-1]).nonzero()[0]
    if 4 * len(changes) >= length:
        return data
    ends = np.empty(len(changes) + 1, "<u4")
    ends[:-1] = changes
    ends[-1] = length - 1
    return stream[ends].tobytes(), (ends + 1).tobytes()


def decompress_stream(kept: bytes | Runs, dtype: np.dtype[Any], length: int, spans: Spans) -> NDArray:
    if isinstance(kept, bytes):
        return np.frombuffer(kept, dtype)
    if not kept[1]:
        return np.frombuffer(fill_spans(kept[0], length, spans), dtype)
    values, ends = np.frombuffer(kept[0], dtype), np.frombuffer(kept[1], "<u4")
    return np.repeat(values, np.diff(ends, prepend=0))


def fill_spans(value: bytes, length: int, spans: Spans) -> bytes:
    if len(spans) == 1:
        start, end = spans[0]
        return bytes(4 * start) + value * (end - start) + bytes(4 * (length - end)) if end <= length else b""
    place, parts = 0, []
    for start, end in spans:
        parts += bytes(4 * (start - place)), value * (end - start)
        place = end
    return b"".join([*parts, bytes(4 * (length - place))]) if place <= length else b""
