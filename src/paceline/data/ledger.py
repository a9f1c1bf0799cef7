"""Accounts for every ticket exactly once.

    waiting -> in flight -> buffered -> trained at step n
                  |             |
                  +-------------+----> dropped for a reason

A group that trains once more does so under a ticket of its own, which enters as buffered: nothing is left to play.

A ticket leaves the books when it is trained or dropped; the totals and the journal remember it. After a resume a ticket
whose group the checkpoint kept is buffered as it was; any other that was open waits again, in its old order, before
anything new is drawn. Only a replay does not: it enters when its batch ships, so no checkpoint ever holds one open.

Each record of the journal says `since` which checkpoint it is, by step (-1: before any). To go back to a checkpoint is
to take out what came since.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection
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
        self.trained_rollouts = 0
        self.replayed = 0
        """Of those drawn: groups that had trained before."""
        self.dropped: Counter[str] = Counter()
        self.since = -1
        """Step of the checkpoint that the next records come after."""
        self._open: dict[Ticket, State] = {}
        self._replays: set[Ticket] = set()
        self._journal = journal

    def draw(self, ticket: Ticket) -> None:
        """A new ticket enters the books."""
        self._enter(ticket, State.WAITING)
        self.waiting.append(ticket)

    def replay(self, ticket: Ticket, first: int) -> None:
        """The group that trained as ticket `first` enters again."""
        self._enter(ticket, State.BUFFERED)
        self._replays.add(ticket)
        self.replayed += 1
        self._journal({**ticket._asdict(), "state": str(State.BUFFERED), "replays": first, "since": self.since})

    def _enter(self, ticket: Ticket, state: State) -> None:
        if ticket.number != self.drawn:
            raise LedgerError(f"ticket {ticket.number} was drawn out of order, {self.drawn} was next")
        self.drawn += 1
        self._open[ticket] = state

    def start(self) -> Ticket:
        """The oldest waiting ticket goes into flight."""
        ticket = self.waiting.popleft()
        self._move(ticket, State.IN_FLIGHT)
        return ticket

    def buffer(self, ticket: Ticket) -> None:
        self._move(ticket, State.BUFFERED)

    def train(self, ticket: Ticket, step: int, rollouts: int) -> None:
        """Its rollouts, so many, were trained in batch `step`."""
        self._move(ticket, State.TRAINED, step=step)
        self._close(ticket)
        self.trained += 1
        self.trained_rollouts += rollouts

    def drop(self, ticket: Ticket, reason: str) -> None:
        self._move(ticket, State.DROPPED, reason=reason)
        self._close(ticket)
        self.dropped[reason] += 1

    def _close(self, ticket: Ticket) -> None:
        del self._open[ticket]
        self._replays.discard(ticket)

    def _move(self, ticket: Ticket, state: State, **details: str | int) -> None:
        before = self._open.get(ticket)
        if before not in _BEFORE[state]:
            raise LedgerError(f"ticket {ticket.number} cannot go from `{before or 'unknown'}` to `{state}`")
        self._open[ticket] = state
        self._journal({**ticket._asdict(), "state": str(state), **details, "since": self.since})

    def count(self, state: State) -> int:
        """Open tickets in a state."""
        return sum(1 for s in self._open.values() if s is state)

    def first(self, state: State) -> Ticket | None:
        """The earliest open ticket in a state."""
        return min((ticket for ticket, its in self._open.items() if its is state), default=None)

    def oldest(self, env: str) -> int | None:
        """The earliest draw of an environment that is still open."""
        return min((ticket.draw for ticket in self._open if ticket.env == env), default=None)

    def state(self, step: int | None = None) -> dict:
        """State for the checkpoint of this step: whatever happens from now on comes after it."""
        self.since = self.since if step is None else step
        return {
            "since": self.since,
            "drawn": self.drawn,
            "trained": self.trained,
            "trained_places": self.trained_rollouts,
            "replayed": self.replayed,
            "dropped": dict(self.dropped + Counter({"replay": len(self._replays)})),
            "open": [list(ticket) for ticket in sorted(self._open.keys() - self._replays)],
            "buffered": self.count(State.BUFFERED) - len(self._replays),
        }

    def load(self, state: dict, kept: Collection[Ticket] = ()) -> None:
        """Back to a checkpoint: what was open there waits again, but for those whose groups were kept."""
        self.since = state.get("since", -1)
        self.drawn, self.trained, self.trained_rollouts = (state[k] for k in ("drawn", "trained", "trained_places"))
        self.replayed = state.get("replayed", 0)
        self.dropped = Counter(state["dropped"])
        self._replays = set()
        self._open = {Ticket(*fields): State.WAITING for fields in state["open"]}
        if strange := sorted(ticket.number for ticket in kept if ticket not in self._open):
            raise LedgerError(f"groups were kept of tickets {strange}, which the books do not have open")
        self._open |= dict.fromkeys(kept, State.BUFFERED)
        self.waiting = deque(ticket for ticket, its in self._open.items() if its is State.WAITING)
