"""The seats of one episode."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

from paceline.rollout.seat import Seat, SeatLeft, Voice

Guests = Mapping[str, Callable[[str], Seat]]
"""Actors whose words are not the policy's, and what makes their seats, by name."""


class Table(Mapping[str, Seat]):
    """Seats by name: one for each actor of the environment, and whatever an episode opens besides.

    An episode that starts others (a proposer whose question several solvers try) opens a seat for each of their actors.
    `parent` and `kind` say where in that tree a seat belongs, so that credit can compare like with like. A seat that
    does not train is played all the same: a judge, or an opponent from the past.
    """

    def __init__(
        self, voice: Voice, noise: Sequence[int], order: int, actors: Sequence[str], guests: Guests | None = None
    ) -> None:
        self._voice, self._noise, self._order = voice, tuple(noise), order
        self._lay(actors, guests)

    def _lay(self, actors: Sequence[str], guests: Guests | None) -> None:
        self._seats: dict[str, Seat] = {}
        self._guests = guests or {}
        self._left = False
        for actor in actors:
            self.open(actor)

    def open(self, actor: str, *, parent: str = "", kind: str = "", model: str = "", trained: bool = True) -> str:
        """Another seat; answers with its name. `model` is an adapter's name; the policy when left out."""
        if self._left:
            raise SeatLeft("the episode is over: no seat can be opened any more")
        place = len(self._seats)
        name = actor
        if name in self._seats:
            name = next(name for number in count(place) if (name := f"{actor}#{number}") not in self._seats)
        guest = self._guests.get(actor)
        seat = guest(name) if guest else self._seat(place, actor, model)
        seat.parent, seat.kind, seat.trained = parent, kind, trained
        self._seats[name] = seat
        return name

    def _seat(self, place: int, actor: str, model: str) -> Seat:
        # The first seat draws the noise a one-player task has always drawn.
        noise = (*self._noise, place) if place else self._noise
        return Seat(self._voice, noise, self._order, actor=actor, model=model)

    def leave(self) -> None:
        """The episode is over."""
        self._left = True
        for seat in self._seats.values():
            seat.leave()

    def __getitem__(self, name: str) -> Seat:
        return self._seats[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._seats)

    def __len__(self) -> int:
        return len(self._seats)
