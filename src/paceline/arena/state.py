"""Holds the state of an episode while it is played."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.arena.types import Actor, ArenaError, EpisodeRequest, EpisodeResult, Event, Step
from paceline.rollout import Message, Seat, SessionMap

if TYPE_CHECKING:
    from paceline.arena.arena import Arena


class Seating:
    """Maps actors to seats while an episode and its continuations are played."""

    def __init__(
        self,
        table: SessionMap,
        seats: Mapping[str, str],
        kind: str,
        parent: str,
        trained: bool,
        models: Mapping[str, str],
    ) -> None:
        self.table, self.seats = table, dict(seats)
        self.kind, self.parent, self.trained = kind, parent, trained
        self.models = models
        """Actors who are not played by the policy, here and in every episode below."""
        self._home = ""
        self._judges: dict[str, str] = {}

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
    def home(self) -> str:
        """The seat that stands for this episode as a parent: the first to have spoken, fixed when first asked for, so
        that all children of one episode name the same."""
        names = list(self.seats.values())
        self._home = self._home or next((name for name in names if self.table[name].turns), names[0])
        return self._home


class EpisodeState:
    """Everything said so far, by whom, and the episode's own data. One per episode played: the `Episode`
    object is shared by all of them and keeps no state of its own."""

    def __init__(self, arena: "Arena", request: EpisodeRequest, seating: Seating) -> None:
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
        self._heard: dict[str, int] = {}

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
        return actor in self._heard

    def conversation(self, actor: Actor) -> list[Message]:
        """This actor's own messages. They only grow, so that a whole game is one sample of exact tokens."""
        return self._conversations.setdefault(actor.id, actor.opening())

    def news(self, actor: str) -> list[Event]:
        """Events of others since this actor's last turn."""
        since = self.events[self._heard.get(actor, 0) :]
        self._heard[actor] = len(self.events)
        return [event for event in since if event.speaker != actor]
