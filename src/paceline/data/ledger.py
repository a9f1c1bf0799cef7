"""Accounts for every ticket exactly once.

    waiting -> in flight -> buffered -> trained at step n
                  |             |
                  +-------------+----> dropped for a reason

A ticket leaves the books when it is trained or dropped; the totals and the journal remember it. What is unresolved at a
checkpoint waits again after a resume, in its old order, before anything new is drawn.
"""

from collections import Counter, deque
from collections.abc import Callable
from enum import StrEnum

from paceline.data.sample import Ticket


class State(StrEnum):
    WAITING = "waiting"
    IN_FLIGHT = "in flight"
    BUFFERED = "buffered"
    TRAINED = "trained"
    DROPPED = "dropped"


_BEFORE = {
    State.IN_FLIGHT: {State.WAITING},
    State.BUFFERED: {State.IN_FLIGHT},
    State.TRAINED: {State.BUFFERED},
    State.DROPPED: {State.IN_FLIGHT, State.BUFFERED},
}


class LedgerError(RuntimeError):
    """A ticket was about to be counted twice or not at all."""


class Ledger:
    """The books. `journal` is told of each change as a plain record."""

    def __init__(self, journal: Callable[[dict], None] = lambda record: None) -> None:
        self.waiting: deque[Ticket] = deque()
        self.drawn = 0
        self.trained = 0
        self.trained_places = 0
        self.dropped: Counter[str] = Counter()
        self._open: dict[Ticket, State] = {}
        self._journal = journal

    def draw(self, ticket: Ticket) -> None:
        """A new ticket enters the books."""
        if ticket.number != self.drawn:
            raise LedgerError(f"ticket {ticket.number} was drawn out of order, {self.drawn} was next")
        self.drawn += 1
        self._open[ticket] = State.WAITING
        self.waiting.append(ticket)

    def start(self) -> Ticket:
        """The oldest waiting ticket goes into flight."""
        ticket = self.waiting.popleft()
        self._move(ticket, State.IN_FLIGHT)
        return ticket

    def buffer(self, ticket: Ticket) -> None:
        self._move(ticket, State.BUFFERED)

    def train(self, ticket: Ticket, step: int, places: int) -> None:
        """Its `places` rollouts were trained in batch `step`."""
        self._move(ticket, State.TRAINED, step=step)
        del self._open[ticket]
        self.trained += 1
        self.trained_places += places

    def drop(self, ticket: Ticket, reason: str) -> None:
        self._move(ticket, State.DROPPED, reason=reason)
        del self._open[ticket]
        self.dropped[reason] += 1

    def _move(self, ticket: Ticket, state: State, **details: str | int) -> None:
        before = self._open.get(ticket)
        if before not in _BEFORE[state]:
            raise LedgerError(f"ticket {ticket.number} cannot go from `{before or 'unknown'}` to `{state}`")
        self._open[ticket] = state
        self._journal({**ticket._asdict(), "state": str(state), **details})

    def count(self, state: State) -> int:
        """Open tickets in a state."""
        return sum(1 for s in self._open.values() if s is state)

    def state(self) -> dict:
        """What a checkpoint keeps."""
        return {
            "drawn": self.drawn,
            "trained": self.trained,
            "trained_places": self.trained_places,
            "dropped": dict(self.dropped),
            "open": [list(ticket) for ticket in sorted(self._open)],
        }

    def load(self, state: dict) -> None:
        """Back to a checkpoint: what was open there waits again."""
        self.drawn, self.trained, self.trained_places = (state[k] for k in ("drawn", "trained", "trained_places"))
        self.dropped = Counter(state["dropped"])
        self._open = {Ticket(*fields): State.WAITING for fields in state["open"]}
        self.waiting = deque(self._open)
