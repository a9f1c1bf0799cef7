"""Defines the results of episodes: turns, rollouts, groups."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.data.sample import Sample, Ticket
from paceline.data.streams import PackedTurn

Message = dict

_IMMUTABLE = {str, int, float, bool, type(None)}


def is_text(message: Message) -> bool:
    """Whether a message is a role and a text, as most are, so that nothing in it needs a second look."""
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
    """As `paceline.engine.Finish`."""
    temperature: float
    log_z: list[float] | None = None
    recomputed: bool = False
    weights: Mapping[int, str] = field(default_factory=dict)
    """Fingerprint of what the engine really held, for each version in `versions`."""
    messages: list[Message] | None = None
    """The conversation the prompt was rendered from; None for a prompt given as tokens."""
    tools: list[dict] | None = None
    """The tools the prompt told of."""
    text: str = ""
    """The sampled text, without the end-of-turn token."""
    said: Message | None = None
    """The message it was handed on as, if that is not simply the text: with tool calls read out of it."""

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


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One actor's turns in one episode."""

    ticket: Ticket
    member: int
    actor: str = "policy"
    """Who spoke."""
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
        """Something a person can read."""
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
        }


@dataclass(slots=True, kw_only=True)
class Group:
    """Rollouts of one ticket that finished: those of one actor are compared with one another."""

    ticket: Ticket
    rollouts: list[Rollout]
    places: int
    """Episodes it was started with, and the places it takes in a batch however many survive."""
    failed: Sequence[Rollout] = ()

    @property
    def members(self) -> int:
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
