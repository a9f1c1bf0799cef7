"""Gives every wait a name and a deadline, so that it can be seen from outside.

    result = await within(300, "an episode of `code`", play())     a deadline of our own
    with waiting("training", on="the trainer"): ...                the other side's deadline; the name is ours

Open waits stand in a registry that the watchdog reads from its own thread. A wait that was opened inside another one
(also in a task that was started there) knows it as its parent, so the registry is a graph: who waits for whom.
"""

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import CoroutineType, FrameType
from typing import Any, Protocol, TypeVar

from paceline.errors import PacelineError
from paceline.util.user_code import user_place

T = TypeVar("T")
log = logging.getLogger("paceline.util.deadlines")
AGAIN_SECONDS = 5.0
"""Cancelled work has this long to clean up, and is then cancelled again: some swallows it and goes on."""
ABANDON_SECONDS = 30.0
"""Work that has not ended by then is named; user code is abandoned."""


class DeadlineError(PacelineError, TimeoutError):
    """Something took longer than it may, and here is what."""


class AbandonedError(DeadlineError):
    """User code that did not end after it was cancelled, and was left where it stood."""


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
        while parent is not None and parent.who is None:  # that wait is over by now
            parent = parent.parent
        self.what = what
        self.who: asyncio.Task[Any] | threading.Thread | None = who
        """None once the wait is over, so that a reference to it keeps no task alive."""
        self.since = time.monotonic()
        self.seconds = seconds
        """How long it may take, where it has a deadline of its own."""
        self.on = on
        """Beginnings of the names of waits that must end before this one can."""
        self.parent: Wait | None = parent
        self.cancels = 0
        """How often the waiting task was cancelled because the deadline is over."""
        self.timer: asyncio.TimerHandle | None = None
        """The next time, once it is over."""

    def expire(self) -> None:
        """The deadline is over: cancel the waiting task, and again until it leaves."""
        assert isinstance(self.who, asyncio.Task)
        self.timer = self.who.get_loop().call_later(AGAIN_SECONDS, self.expire)
        if self.cancels == round(ABANDON_SECONDS / AGAIN_SECONDS) + 1:  # user code is abandoned by now
            text = "%s does not let itself be cancelled, %g s after its %g s are over: pass asyncio.CancelledError on"
            log.warning(text, self.what, self.cancels * AGAIN_SECONDS, self.seconds)
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
    """The wait that the caller's task is part of: `an episode of `code``. Empty where nothing is waited for."""
    wait = _current.get()
    return "" if wait is None else wait.what


def beat() -> None:
    """Tell the watchdog that something has moved."""
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
        left = work.left if type(work) is _UserCall else None
        if wait.cancels and wait.uncancel() <= cancelling:
            if left is not None:
                raise AbandonedError(left) from error
            raise DeadlineError(f"{what} took longer than {seconds:g} s") from error
        if left is not None:
            log.warning(left)
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
        if type(work) is _UserCall:
            work.close()
        _leave(wait, token)


def abandonable(seconds: float, what: str, work: Awaitable[T]) -> Coroutine[Any, Any, T]:
    """As `within`, for user code, which may swallow its cancellation.

    A task cannot be killed, but its work can be left where it stands. `ABANDON_SECONDS` after the deadline, or after
    the caller was cancelled, the work is abandoned: the caller goes on with an `AbandonedError` or its cancellation,
    and the work is not resumed. Timers of the work may still cancel the caller's task, so that task should end soon.
    """
    return within(seconds, what, _UserCall(work))


class _UserCall:
    """Awaits user code within the caller's task, and can stop awaiting it although it has not ended."""

    __slots__ = ("_begun", "_given_up", "_timer", "_wait", "_work", "left")

    def __init__(self, work: Awaitable[Any]) -> None:
        self.left: str | None = None
        """The message about it, once it is abandoned."""
        self._work = work
        self._wait: Wait | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._begun = self._given_up = False

    def __await__(self) -> Generator[Any, None, Any]:
        self._wait, self._begun = _current.get(), True
        work: Any = self._work
        driven = work if type(work) is CoroutineType else work.__await__()  # a wrapper less for each episode
        error: BaseException | None = None
        while True:
            try:
                future = driven.send(None) if error is None else driven.throw(error)
            except StopIteration as end:
                return end.value
            error = None
            try:
                if future is None or type(future) is asyncio.Future:
                    yield future
                else:
                    yield from self._ended(future)
            except GeneratorExit:
                driven.close()
                raise
            except BaseException as thrown:
                error = thrown
                if self._given_up:
                    self._abandon()
                    raise
                self._give_up_later()

    def _ended(self, future: "asyncio.Future[Any]") -> Generator[Any, None, None]:
        """Wait for a task, or for several: unlike a plain future it may outlive its cancellation."""
        future._asyncio_future_blocking = False
        while not future.done():
            end = _End(future)
            try:
                yield end
            except asyncio.CancelledError:
                future.remove_done_callback(end.wake)
                if self._given_up or not future.cancel():
                    raise
                self._give_up_later()

    def _give_up_later(self) -> None:
        if self._timer is None:
            task = asyncio.current_task()
            assert task is not None
            assert self._wait is not None
            # After the deadline the wait itself cancels every `AGAIN_SECONDS`: the last time must find it given up.
            seconds = ABANDON_SECONDS - (0.5 * AGAIN_SECONDS if self._wait.cancels else 0.0)
            self._timer = task.get_loop().call_later(seconds, self._give_up, task, task.cancelling())

    def _give_up(self, task: "asyncio.Task[Any]", cancelling: int) -> None:
        self._timer = None
        if not task.cancelling() >= cancelling > 0:
            return  # it has dealt with it: a time-out of its own
        assert self._wait is not None
        self._given_up = True
        if not self._wait.cancels:
            task.cancel()

    def _abandon(self) -> None:
        """Keep the work from the garbage collector, and say where it stands."""
        _keep(self._work)
        at = user_place(awaited_frames(self._work))
        assert self._wait is not None
        self.left = (
            f"{self._wait.what} was cancelled and did not end within {ABANDON_SECONDS:g} s{at and f', at {at}'}: it is "
            "abandoned; let asyncio.CancelledError pass there"
        )

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._begun and inspect.iscoroutine(self._work):
            self._work.close()  # it never will be awaited


class _End(asyncio.Future[None]):
    """The end of another future, to wait for in its place."""

    def __init__(self, awaited: "asyncio.Future[Any]") -> None:
        super().__init__(loop=awaited.get_loop())
        self.awaited = awaited
        self._asyncio_future_blocking = True
        awaited.add_done_callback(self.wake)

    def wake(self, _: object) -> None:
        if not self.done():
            self.set_result(None)


_abandoned: list[object] = []
"""User code that swallowed its cancellation: nothing waits for it any more."""


def _keep(work: object) -> None:
    """Hold abandoned work until the process ends. Collected, its coroutine would get a GeneratorExit, swallow that too
    and go on without a loop: for ever, where it catches the error of that as well. A daemon thread's frame is the one
    place that the interpreter does not clear when it shuts down."""
    if not _abandoned:
        threading.Thread(target=_hold, args=(_abandoned,), name="abandoned user code", daemon=True).start()
    _abandoned.append(work)


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
        if frame.f_code is _UserCall.__await__.__code__:
            coroutine = frame.f_locals["self"]._work


@contextmanager
def waiting(what: str, on: str | tuple[str, ...] = ()) -> Generator[Wait]:
    """Name a wait whose deadline is kept by the other side.

    `on` names that side: open waits whose names begin so are drawn below this one.
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
    except ValueError:  # thrown away half-way: the garbage collector ran in another context
        pass


def _who() -> "asyncio.Task[Any] | threading.Thread":
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task or threading.current_thread()


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. The first failure is raised as it is, once everything else has been cancelled and ended:
    nothing goes on speaking after its episode is over."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)  # bounded: as each of the works is
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # bounded: they are cancelled


class Clock(Protocol):
    """Tells the time and bounds waits."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def within(self, seconds: float, what: str, work: Awaitable[T]) -> Awaitable[T]:
        """The result of user code's `work`, or a `DeadlineError` that names what was waited for."""
        ...


class RealClock:
    """The machine's own time."""

    def now(self) -> float:
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def within(self, seconds: float, what: str, work: Awaitable[T]) -> Awaitable[T]:
        return abandonable(seconds, what, work)
