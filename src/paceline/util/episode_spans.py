"""Measures what an episode waits for besides the engine: sandboxes, graders, judges and the user's own functions.

The runner opens the spans of an episode, and whatever is waited for in it measures itself with `episode_span`, however
deep it stands, also in tasks and threads that the episode starts. Outside an episode nothing is kept.
"""

import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

Span = tuple[str, float, float]
"""What was waited for, when it began, in seconds since the episode did, and how many seconds it took."""
MOST_SPANS = 256
"""Of one episode; an agent may call a tool ten thousand times."""


class EpisodeSpans:
    """The spans of one episode. `running` counts what all episodes of a run are waiting for now, by kind."""

    def __init__(self, running: Counter[str], opened: float) -> None:
        self.opened, self.ended, self.running = opened, list[Span](), running


_current: ContextVar[EpisodeSpans | None] = ContextVar("spans of the episode", default=None)


def open_spans(running: Counter[str], opened: float) -> list[Span]:
    """From here on this task plays an episode, which was opened at this moment of `time.perf_counter`; its spans come
    into the list that is returned."""
    _current.set(spans := EpisodeSpans(running, opened))
    return spans.ended


@contextmanager
def episode_span(kind: str) -> Generator[None]:
    """What runs in this context belongs to the episode as one span."""
    if (spans := _current.get()) is None:
        yield
        return
    began = time.perf_counter()
    spans.running[kind] += 1
    try:
        yield
    finally:
        spans.running[kind] -= 1
        if len(spans.ended) < MOST_SPANS:
            spans.ended.append((kind, began - spans.opened, time.perf_counter() - began))
