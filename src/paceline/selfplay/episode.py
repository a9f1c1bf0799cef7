"""Defines episodes and their data: requests, results, and turns between actors, scored by a weighted sum of functions.

initial actor -> [ what they hear -> their words -> environment's response -> done? -> next actor ] -> rubric
"""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.envs.base import EnvError, parse_reward
from paceline.envs.offloop import run_user_code
from paceline.rollout import Message, Reply, Seat, SessionMap
from paceline.util.deadlines import gather_or_cancel

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

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "data": self.data}


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
    """Everything said so far, by whom, and the data of one episode played; the `Episode` object is shared by all."""

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


Scores = Mapping[str, float]
RubricFunction = Callable[[EpisodeState, "Arena"], Scores | Awaitable[Scores]]


class Rubric:
    """Each function scores some actors, `fn(state, arena) -> {actor: number}`; an actor's reward is the weighted sum.

    Async functions may ask a judge (`arena.call_model`). Sync ones run off the event loop, so that a slow check holds
    up no other episode. An actor no function mentions earns 0.
    """

    def __init__(self, funcs: Sequence[RubricFunction] = (), weights: Sequence[float] | None = None) -> None:
        self._funcs = list(funcs)
        self._weights = [1.0] * len(self._funcs) if weights is None else [float(weight) for weight in weights]
        if len(self._weights) != len(self._funcs):
            raise ArenaError(
                f"a rubric has {len(self._funcs)} functions but {len(self._weights)} weights: "
                "give one weight for each function, or leave weights out"
            )
        if not all(map(math.isfinite, self._weights)):
            raise ArenaError(f"a rubric has weights {self._weights}: every weight must be a finite number")

    async def score(self, state: EpisodeState, arena: "Arena") -> tuple[dict[str, float], dict[str, float]]:
        """Each actor's reward, and each function's own scores as metrics."""
        rewards = dict.fromkeys(state.actors, 0.0)
        metrics: dict[str, float] = {}
        answers = await gather_or_cancel([run_user_code(func, state, arena) for func in self._funcs])
        for func, weight, scores in zip(self._funcs, self._weights, answers, strict=True):
            for actor, value in _check_scores(func, scores, state).items():
                rewards[actor] += weight * value
                metrics[_name(func) if len(state.actors) == 1 else f"{_name(func)}/{actor}"] = value
        return rewards, metrics


def _check_scores(func: RubricFunction, scores: object, state: EpisodeState) -> dict[str, float]:
    where = f"rubric function `{_name(func)}` of episode `{state.request.episode_type}`"
    if not isinstance(scores, Mapping):
        raise ArenaError(f"{where} returned {scores!r}: return a dict of actor and number")
    for actor in scores:
        if actor not in state.actors:
            known = ", ".join(f"`{name}`" for name in state.actors)
            raise ArenaError(f"{where} scores `{actor}`, but the actors of this episode are {known}")
    return {str(actor): parse_reward(value, where) for actor, value in scores.items()}


def _name(func: RubricFunction) -> str:
    return getattr(func, "__name__", type(func).__name__)


class Episode(ABC):
    """One kind of episode. The object is shared by all that are played at once: what belongs to one is in its state."""

    actors: Sequence[str] = ()
    """Its actors, in order; all actors of the arena when left empty."""

    @property
    @abstractmethod
    def episode_type(self) -> str:
        """The name requests choose it by."""

    @property
    @abstractmethod
    def rubric(self) -> Rubric:
        """The rubric that scores it."""

    @abstractmethod
    async def rollout(self, arena: "Arena", artifact: Artifact, state: EpisodeState) -> None:
        """Play it, speaking through `call_model`."""

    def init_state(self, state: EpisodeState, artifact: Artifact) -> None:  # noqa: B027 - optional by design
        """Prepare `state.data` before the first turn."""

    def get_metrics(self, state: EpisodeState) -> dict[str, float]:
        """Numbers to report beside the rubric's."""
        return {}

    async def call_model(self, state: EpisodeState, actor: str, messages: Sequence[Message]) -> Reply:
        """An actor's reply to these messages; recorded and trained."""
        return await state.arena.call_model(state, messages, actor)

    async def spawn(self, state: EpisodeState, request: EpisodeRequest) -> EpisodeResult:
        """Play another episode as a child of this one."""
        (result,) = await self.spawn_all(state, [request])
        return result

    async def spawn_all(self, state: EpisodeState, requests: Sequence[EpisodeRequest]) -> list[EpisodeResult]:
        """Play several children at once."""
        arena, parent = state.arena, state.seating
        # Seats are taken before the first turn: their noise follows their place, which must not depend on who is quick.
        seatings = [arena.assign_seats(request, parent.table, parent) for request in requests]
        plays = [arena.play(request, seating) for request, seating in zip(requests, seatings, strict=True)]
        results = await gather_or_cancel(plays)
        state.children += results
        return results

    async def play(self, arena: "Arena", request: EpisodeRequest, seating: SeatAssignment) -> EpisodeResult:
        """One episode from its request to its rewards, with its continuations."""
        state = EpisodeState(arena, request, seating)
        self.init_state(state, request.artifact)
        await self.rollout(arena, request.artifact, state)
        rewards, metrics = await self.rubric.score(state, arena)
        result = EpisodeResult(
            request=request,
            seats=seating.seats,
            rewards=rewards,
            metrics=metrics | self.get_metrics(state),
            steps=state.steps,
            data=state.data,
            children=state.children,
        )
        return result if state.then is None else result.merge_continuation(await arena.play(state.then, seating))


class MultiTurnEpisode(Episode):
    """Actors speak in turns. Each hears, as one message, what happened since their own last turn.

    Everything said is heard by all, as `describe` tells it; what `get_observation` answers reaches only the actor
    whose turn it is. The environment responds to every turn, also the last one, before `is_done` is asked.
    """

    max_turns: int = 32
    """Turns of all actors together; -1 for no end but `is_done`."""

    @abstractmethod
    def get_initial_prompt(self, arena: "Arena", artifact: Artifact, state: EpisodeState) -> str:
        """The text `state.current_actor` hears on their first turn."""

    def get_initial_actor(self, artifact: Artifact, state: EpisodeState) -> str:
        """The actor that begins."""
        return state.actors[0]

    def get_observation(self, state: EpisodeState, arena: "Arena", artifact: Artifact) -> str | None:
        """Text that only `state.current_actor` sees at this moment."""
        return None

    async def env_response(self, state: EpisodeState, arena: "Arena", artifact: Artifact) -> str | None:
        """Act on what was just said (`state.last_text`); the answer is heard by all. Set `state.done` to end it."""
        return None

    def is_done(self, state: EpisodeState, artifact: Artifact) -> bool:
        return False

    def get_next_actor(self, state: EpisodeState, artifact: Artifact) -> str:
        """Whose turn is next; in order when left out."""
        return state.actors[(state.actors.index(state.current_actor) + 1) % len(state.actors)]

    def describe(self, event: Event, listener: str) -> str | None:
        """How another actor hears of an event; None keeps it from them."""
        return f"{event.speaker}: {event.text}" if event.speaker else event.text

    def compose(self, state: EpisodeState, opening: str | None, told: Sequence[str], observation: str | None) -> str:
        """The message `state.current_actor` hears: their initial prompt on their first turn, what others said and did
        since their last one, and what they alone observe."""
        return "\n\n".join(part for part in (opening, *told, observation) if part)

    async def rollout(self, arena: "Arena", artifact: Artifact, state: EpisodeState) -> None:
        state.current_actor = self.get_initial_actor(artifact, state)
        while True:
            await self._play_turn(arena, artifact, state)
            if response := await self.env_response(state, arena, artifact):
                state.events.append(Event("", response))
            if state.done or state.turn == self.max_turns or self.is_done(state, artifact):
                return
            state.current_actor = self.get_next_actor(state, artifact)

    async def _play_turn(self, arena: "Arena", artifact: Artifact, state: EpisodeState) -> None:
        actor = arena.actor(state.current_actor)
        opening = None if state.began(actor.id) else self.get_initial_prompt(arena, artifact, state)
        observation = self.get_observation(state, arena, artifact)
        described = (self.describe(event, actor.id) for event in state.unseen_events(actor.id))
        told = [text for text in described if text is not None]
        conversation = state.conversation(actor)
        conversation.append({"role": "user", "content": self.compose(state, opening, told, observation)})
        reply = await self.call_model(state, actor.id, conversation)
        conversation.append(reply.message)
        state.events.append(Event(actor.id, reply.text))


class SingleTurnEpisode(MultiTurnEpisode):
    """One actor, one reply."""

    max_turns = 1
