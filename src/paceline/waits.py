"""What is being waited for: every wait has a name and a deadline, and can be seen from outside.

    result = await within(300, "an episode of `code`", play())     a deadline of our own
    with waiting("training", on="the trainer"): ...                somebody else's deadline; the name is ours

Open waits stand in a registry that the watchdog reads from its own thread. A wait that was opened inside another one
(also in a task that was started there) knows it as its parent, so the registry is a graph: who waits for whom.
"""

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import FrameType
from typing import Any, TypeVar

from paceline.errors import PacelineError
from paceline.user_code import is_ctrl_c, user_place

T = TypeVar("T")
log = logging.getLogger("paceline.waits")
AGAIN_SECONDS = 5.0
"""Whoever is cancelled gets so long to clean up, and is then cancelled again: some swallow it and go on."""
DEAF_SECONDS = 30.0
"""Whoever has not gone by then is named, and user code abandoned."""


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


def current_wait() -> str:
    """What the caller's task is part of: `an episode of `code``. Empty where nothing is waited for."""
    wait = _current.get()
    return "" if wait is None else wait.what


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


async def abandonable(seconds: float, what: str, work: Awaitable[T]) -> T:
    """As `within`, for user code, which may swallow its cancellation.

    The work runs in a task of its own. It is cancelled when the caller is cancelled, or when its time is over and then
    again every `AGAIN_SECONDS`. `DEAF_SECONDS` later it is abandoned, as a task cannot be killed: the caller goes on,
    with a `DeadlineError` or its own cancellation, and what the work still does or returns is thrown away.
    """
    apart = _Apart(what, seconds, work)
    try:
        value, error = await apart.outcome()
    finally:
        apart.close()
    if error is not None:
        raise error
    registry.moved += 1
    return value


class _Apart:
    """Work in a task of its own, and the wait for it."""

    def __init__(self, what: str, seconds: float, work: Awaitable[Any]) -> None:
        self._loop = asyncio.get_running_loop()
        caller = asyncio.current_task()
        assert caller is not None
        self._work = work
        self._wait = Wait(what, caller, seconds)
        _open[self._wait] = None
        self._token = _current.set(self._wait)
        self._task = self._loop.create_task(self._settled(), name=caller.get_name())
        self._wait.who = self._task  # whose stack is the one to show
        self._ended: asyncio.Future[None] | None = None
        self._task.add_done_callback(self._end)
        self._timer = self._loop.call_later(seconds, self._expire)
        self._begun = self._late = self._abandoned = False
        self._last: asyncio.TimerHandle | None = None
        """When it is given up, once it was cancelled."""

    async def outcome(self) -> tuple[Any, BaseException | None]:
        """What the work returned and raised."""
        called_off: asyncio.CancelledError | None = None
        while not (self._task.done() or self._abandoned):
            self._ended = self._loop.create_future()
            try:
                await self._ended  # bounded: by `_expire` and `_give_up`
            except asyncio.CancelledError as error:
                called_off = error
                self._task.cancel()
                self._give_up_later()
        if self._abandoned:
            text = self._abandon()
            if called_off is not None:
                log.warning(text)
            return None, called_off or DeadlineError(text)
        if called_off is not None:
            return None, called_off  # whatever the work made of it
        value, error = None, asyncio.CancelledError()
        if not self._task.cancelled():  # before its first step
            value, error = self._task.result()  # bounded: it is done
        if isinstance(error, asyncio.CancelledError) and self._late:
            late = DeadlineError(f"{self._wait.what} took longer than {self._wait.seconds:g} s")
            late.__cause__ = error
            return None, late
        return value, error

    async def _settled(self) -> tuple[Any, BaseException | None]:
        """Never raises: a task that raises SystemExit or KeyboardInterrupt takes its event loop down."""
        self._begun = True
        try:
            return await self._work, None  # bounded: by `_expire`
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            return None, error

    def _end(self, task: "asyncio.Task[Any] | None" = None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _expire(self) -> None:
        """Its time is over: cancel it, and again until it ends."""
        self._late = True
        self._give_up_later()
        self._timer = self._loop.call_later(AGAIN_SECONDS, self._expire)
        self._task.cancel()

    def _give_up_later(self) -> None:
        if self._last is None:
            self._last = self._loop.call_later(DEAF_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self._abandoned = True
        self._end()

    def _abandon(self) -> str:
        """Keep the task from the garbage collector, and say where it stands."""
        _keep(self._task)
        at = user_place(awaited_frames(self._task.get_coro()))
        return (
            f"{self._wait.what} was cancelled and did not end within {DEAF_SECONDS:g} s{at and f', at {at}'}: it is "
            "abandoned; let asyncio.CancelledError pass there"
        )

    def close(self) -> None:
        for timer in (self._timer, self._last):
            if timer is not None:
                timer.cancel()
        if not self._begun and inspect.iscoroutine(self._work):
            self._work.close()  # it never will be awaited
        _leave(self._wait, self._token)


abandoned: list["asyncio.Task[Any]"] = []
"""Tasks that swallow their cancellation: nothing waits for them any more."""


def _keep(task: "asyncio.Task[Any]") -> None:
    """Hold an abandoned task until the process ends. Collected, its coroutine would get a GeneratorExit, swallow that
    too and go on without a loop: for ever, where it catches the error of that as well. A daemon thread's frame is the
    one place that the interpreter does not clear when it shuts down."""
    task._log_destroy_pending = False  # ty: ignore[missing-attribute]
    if not abandoned:
        threading.Thread(target=_hold, args=(abandoned,), name="abandoned tasks", daemon=True).start()
    abandoned.append(task)


def _hold(kept: object) -> None:
    threading.Event().wait()  # unbounded: as long as the process lives


def awaited_frames(coroutine: Any) -> Iterator[FrameType]:
    """The frames of a suspended coroutine, from its own down to what it awaits."""
    for _ in range(100):
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


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
