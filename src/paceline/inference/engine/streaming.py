"""Who listens to a completion hears of its tokens while they come."""

import time
from collections.abc import Callable

from paceline.inference.engine.sequence import Sequence

LISTENER_SECONDS = 0.0002
"""What it costs, from here to a client, to tell one listener something."""
LONGEST_SECONDS = 0.1


class TokenStreamer:
    """Tells each listener what is new.

    A few hear of every token at once. A crowd is told again only after as long as telling all of it takes, several
    tokens each time: otherwise the telling, not the decoding, would set the pace. Nobody waits longer than a moment,
    and a completion's last tokens are told before its end.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._news: dict[Sequence, None] = {}
        """Sequences with tokens nobody has heard of."""
        self._due = 0.0

    def note(self, sequence: Sequence) -> None:
        """It has a new token."""
        self._news[sequence] = None

    def tell(self, now: bool = False) -> None:
        """Tell all that is new, if it is time."""
        if not self._news or (self._clock() < self._due and not now):
            return
        for sequence in self._news:
            self._say(sequence)
        self._due = self._clock() + min(len(self._news) * LISTENER_SECONDS, LONGEST_SECONDS)
        self._news.clear()

    def finish(self, sequence: Sequence) -> None:
        """It is over: its listener hears the rest."""
        if sequence in self._news:
            del self._news[sequence]
            self._say(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Nobody listens any more."""
        self._news.pop(sequence, None)

    def _say(self, sequence: Sequence) -> None:
        assert sequence.listener is not None
        sequence.listener(sequence.untold())
