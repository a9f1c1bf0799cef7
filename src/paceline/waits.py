"""What is being waited for: every wait has a name and a deadline, and can be seen from outside.

    result = await within(300, "an episode of `code`", play())     a deadline of our own
    with waiting("training", on="the trainer"): ...                somebody else's deadline; the name is ours

Open waits stand in a registry that the watchdog reads from its own thread. A wait that was opened inside another one
(also in a task that was started there) knows it as its parent, so the registry is a graph: who waits for whom.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, TypeVar

from paceline.errors import PacelineError

T = TypeVar("T")
log = logging.getLogger("paceline.waits")
AGAIN_SECONDS = 5.0
"""Whoever is cancelled gets so long to clean up, and is then cancelled again: some swallow it and go on."""
DEAF_SECONDS = 30.0
"""Whoever has not gone by then is named."""


class DeadlineError(PacelineError, TimeoutError):
    """Something took longer than it may, and here is what."""


class Wait:
    """One open wait. It costs about a microsecond, for there is one for each episode."""

    __slots__ = ("cancels", "on", "parent", "seconds", "since", "timer", "what", "who")

    def __init__(
        self,
        what: str,
        who: "asyncio.Task[Any] | threading.Thread",
        seconds: float | None = None,
        on: tuple[str, ...] = (),
    ) -> None:
        parent = _current.get()
        while parent is not None and parent.who is None:  # opened by somebody who has left it since
            parent = parent.parent
        self.what = what
        self.who: asyncio.Task[Any] | threading.Thread | None = who
        """None once the wait is over: whoever still holds it keeps no task alive."""
        self.since = time.monotonic()
        self.seconds = seconds
        """What it may take, where it has a deadline of its own."""
        self.on = on
        """Beginnings of the names of waits that must end before this one can."""
        self.parent: Wait | None = parent
        self.cancels = 0
        """How often whoever waits was woken because the deadline is over."""
        self.timer: asyncio.TimerHandle | None = None
        """The next time, once it is over."""

    def expire(self) -> None:
        """The deadline is over: whoever waits is woken, and woken again until they go."""
        assert isinstance(self.who, asyncio.Task)
        self.timer = self.who.get_loop().call_later(AGAIN_SECONDS, self.expire)
        if self.cancels == round(DEAF_SECONDS / AGAIN_SECONDS):
            text = "%s does not let itself be cancelled, %g s after its %g s are over: pass asyncio.CancelledError on"
            log.warning(text, self.what, DEAF_SECONDS, self.seconds)
        self.cancels += 1
        self.who.cancel()

    def uncancel(self) -> int:
        """Take all of that back; answers with the cancellations that others asked for."""
        assert isinstance(self.who, asyncio.Task)
        for _ in range(self.cancels):
            self.who.uncancel()
        if self.timer is not None:
            self.timer.cancel()
        return self.who.cancelling()


class Registry:
    """Open waits in the order of their beginnings, and how many have come to a good end."""

    def __init__(self) -> None:
        self.open: dict[Wait, None] = {}
        self.moved = 0
        """Counts progress. Polls that come back to say that nothing has happened must not count."""

    def waits(self) -> list[Wait]:
        """Open ones, the oldest first. Safe from any thread."""
        while True:
            try:
                return list(self.open)
            except RuntimeError:  # a finaliser that ran while the list was made closed a wait
                continue


registry = Registry()
_open = registry.open
_current: ContextVar[Wait | None] = ContextVar("wait", default=None)


def beat() -> None:
    """Tell whoever watches that something has moved."""
    registry.moved += 1


async def within(seconds: float, what: str, work: Awaitable[T], *, moves: bool = True) -> T:
    """The result of `work`, or a `DeadlineError` that names what was waited for.

    The same as `asyncio.timeout` around a named wait, in one object and one timer instead of two. `moves` says whether
    a good end is progress of the run, which is not so for a health check.
    """
    task = asyncio.current_task()
    assert task is not None
    cancelling = task.cancelling()
    wait = Wait(what, task, seconds)
    timer = task.get_loop().call_later(seconds, wait.expire)
    _open[wait] = None
    token = _current.set(wait)
    try:
        result = await work  # bounded: here is the bound
    except asyncio.CancelledError as error:
        if wait.cancels and wait.uncancel() <= cancelling:
            raise DeadlineError(f"{what} took longer than {seconds:g} s") from error
        raise
    except BaseException:
        if wait.cancels:
            wait.uncancel()
        raise
    else:
        if wait.cancels:
            wait.uncancel()
        if moves:
            registry.moved += 1
        return result
    finally:
        timer.cancel()
        _leave(wait, token)


@contextmanager
def waiting(what: str, on: str | tuple[str, ...] = ()) -> Generator[Wait]:
    """Name a wait whose deadline is kept by whoever is waited for.

    `on` names who that is: open waits whose names begin so are drawn below this one.
    """
    wait = Wait(what, _who(), on=(on,) if isinstance(on, str) else on)
    _open[wait] = None
    token = _current.set(wait)
    try:
        yield wait
    finally:
        _leave(wait, token)


def _leave(wait: Wait, token: Token[Wait | None]) -> None:
    wait.who = None
    del _open[wait]
    try:  # noqa: SIM105 - a context manager costs more than the wait
        _current.reset(token)
    except ValueError:  # thrown away half-way: the garbage collector came in somebody else's context
        pass


def _who() -> "asyncio.Task[Any] | threading.Thread":
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task or threading.current_thread()
