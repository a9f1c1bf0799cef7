"""Batches token callbacks so that streaming never throttles decoding."""

import time
from collections.abc import Callable

from paceline.inference.engine.sequence import Sequence

LISTENER_SECONDS = 0.0002
"""Cost of one call of a listener, from here to a client."""
LONGEST_SECONDS = 0.1


class TokenStreamer:
    """Calls each listener with its new tokens.

    A few listeners are called for every token. Many are called again only after as long as calling them all takes, but
    at most `LONGEST_SECONDS`, with several tokens each time: otherwise the calls, not the decoding, would set the pace.
    A completion's last tokens are told before its end.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._news: dict[Sequence, None] = {}
        """Sequences with tokens that their listeners have not received."""
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
        """Its listener no longer waits."""
        self._news.pop(sequence, None)

    def _say(self, sequence: Sequence) -> None:
        assert sequence.listener is not None
        sequence.listener(sequence.untold())
