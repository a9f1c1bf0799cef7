"""Data types of self-play: actors, artifacts, requests and results, and the state of an episode under way."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.envs import EnvError
from paceline.rollout import Message, Seat, SessionMap

if TYPE_CHECKING:
    from paceline.selfplay.arena import Arena


class ArenaError(EnvError):
    """An arena that cannot be played, as a sentence for the user."""


@dataclass(frozen=True, slots=True)
class Actor:
    """A role the policy plays and is trained in. Judges are no actors."""

    id: str
    system_prompt: str = ""
    max_tokens: int | None = None
    """Longest reply of this actor; the run's `sampling.max_tokens` when left out."""

    def opening(self) -> list[Message]:
        """The messages every conversation with this actor begins with."""
        return [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []

    def build_messages(self, user: str) -> list[Message]:
        """A conversation of one question."""
        return [*self.opening(), {"role": "user", "content": user}]


@dataclass(frozen=True, slots=True)
class Artifact:
    """The subject of an episode: a question, a deal of cards, an opening.

    Left out, the id is a hash of the data, so that the same thing drawn twice is the same artifact: episodes on it are
    tries of one example, and those on different artifacts never share a baseline.
    """

    data: Any
    id: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            text = json.dumps(self.data, sort_keys=True, default=repr)
            object.__setattr__(self, "id", hashlib.blake2b(text.encode(), digest_size=8).hexdigest())


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """A request to play an episode."""

    episode_type: str
    artifact: Artifact
    meta: dict[str, Any] = field(default_factory=dict)
    is_trainable: bool = True
    """False plays it, and everything it spawns, without training on it."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Actors played by a served adapter instead of the policy, by its name; they do not train."""

    @property
    def key(self) -> tuple[str, str]:
        """Requests that agree here are tries of one thing."""
        return self.episode_type, self.artifact.id


@dataclass(frozen=True, slots=True)
class Step:
    """One thing an actor said, and the conversation it was an answer to."""

    actor: str
    messages: tuple[Message, ...]
    text: str
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """Something all actors may hear of: an actor's words, or, with no speaker, what the environment says to all."""

    speaker: str
    text: str


@dataclass(slots=True)
class EpisodeResult:
    """How an episode ended, with those it spawned."""

    request: EpisodeRequest
    seats: dict[str, str]
    """The seat each actor sat in."""
    rewards: dict[str, float]
    metrics: dict[str, float]
    steps: list[Step]
    data: dict[str, Any]
    """The episode's own data (`EpisodeState.data`)."""
    children: list["EpisodeResult"] = field(default_factory=list)

    def merge_continuation(self, later: "EpisodeResult") -> "EpisodeResult":
        """This episode and its continuation in the same seats as one, whose rewards add up and credit every part."""
        return replace(
            self,
            rewards={actor: reward + later.rewards[actor] for actor, reward in self.rewards.items()},
            metrics=self.metrics | later.metrics,
            steps=[*self.steps, *later.steps],
            data=self.data | later.data,
            children=[*self.children, *later.children],
        )

    def tree(self) -> list["EpisodeResult"]:
        """This episode and all below it, parents first."""
        return [self, *(below for child in self.children for below in child.tree())]


@dataclass(slots=True)
class SeatAssignment:
    """Maps actors to seats while an episode and its continuations are played."""

    table: SessionMap
    seats: dict[str, str]
    kind: str
    parent: str
    trained: bool
    models: Mapping[str, str]
    """Actors who are not played by the policy, here and in every episode below."""
    _lead_seat: str = ""
    _judges: dict[str, str] = field(default_factory=dict)

    def seat(self, actor: str) -> Seat:
        if actor not in self.seats:
            raise ArenaError(
                f"actor `{actor}` has no seat in episode `{self.kind}`: add it to the episode's `actors`, "
                f"which are {', '.join(f'`{name}`' for name in self.seats)}"
            )
        return self.table[self.seats[actor]]

    def judge(self, model: str = "") -> Seat:
        """A seat that is asked and never trained."""
        if model not in self._judges:
            self._judges[model] = self.table.open(
                "judge", parent=self.parent, kind=self.kind, model=model, trained=False
            )
        return self.table[self._judges[model]]

    @property
    def lead_seat(self) -> str:
        """The seat that stands for this episode as a parent: the first to have spoken, fixed when first asked for, so
        that all children of one episode name the same."""
        names = list(self.seats.values())
        self._lead_seat = self._lead_seat or next((name for name in names if self.table[name].turns), names[0])
        return self._lead_seat


class EpisodeState:
    """Everything said so far, by whom, and the episode's own data. One per episode played: the `Episode`
    object is shared by all of them and keeps no state of its own."""

    def __init__(self, arena: "Arena", request: EpisodeRequest, seating: SeatAssignment) -> None:
        self.arena, self.request, self.seating = arena, request, seating
        self.data: dict[str, Any] = {}
        """The episode's own: a board, a pot, a question."""
        self.steps: list[Step] = []
        self.events: list[Event] = []
        """Events that all actors may hear of, in order."""
        self.current_actor = ""
        self.done = False
        """Set it to end a multi-turn episode after this turn."""
        self.children: list[EpisodeResult] = []
        self.then: EpisodeRequest | None = None
        """Set it to go on with another episode in the same seats: its rewards are added to this one's."""
        self._conversations: dict[str, list[Message]] = {}
        self._events_seen: dict[str, int] = {}

    @property
    def actors(self) -> list[str]:
        """The actors of this episode, in order."""
        return list(self.seating.seats)

    @property
    def turn(self) -> int:
        """Turns taken so far."""
        return len(self.steps)

    @property
    def last_text(self) -> str:
        """The last reply; empty before the first."""
        return self.steps[-1].text if self.steps else ""

    def began(self, actor: str) -> bool:
        """Whether this actor has had a turn; while they hear what their first one brings, not yet."""
        return actor in self._events_seen

    def conversation(self, actor: Actor) -> list[Message]:
        """This actor's own messages. They only grow, so that a whole game is one sample of exact tokens."""
        return self._conversations.setdefault(actor.id, actor.opening())

    def unseen_events(self, actor: str) -> list[Event]:
        """Events of others since this actor's last turn."""
        since = self.events[self._events_seen.get(actor, 0) :]
        self._events_seen[actor] = len(self.events)
        return [event for event in since if event.speaker != actor]
