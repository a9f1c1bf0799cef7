"""Gives every wait a name and a deadline, so that it can be seen from outside.

    result = await wait_within(300, "an episode of `code`", play())  # a deadline of our own
    with named_wait("training", waits_for="the trainer"): ...        # the other side has the deadline

Open waits stand in a registry that the watchdog reads from its own thread. A wait that was opened inside another one
(also in a task that was started there) knows it as its parent, so the registry is a graph: who waits for whom.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Coroutine, Generator, Iterator, Sequence
from contextvars import ContextVar
from types import CoroutineType, FrameType
from typing import Any, Self, TypeVar

from paceline.errors import PacelineError
from paceline.util.user_code import user_place

T = TypeVar("T")
log = logging.getLogger("paceline.util.deadlines")
RECANCEL_SECONDS = 5.0
"""Cancelled work has this long to clean up, and is then cancelled again: some swallows it and goes on."""
ABANDON_SECONDS = 30.0
"""Work that has not ended by then is named; user code is abandoned."""


class DeadlineError(PacelineError, TimeoutError):
    """Something took longer than it may, and here is what."""


class AbandonedError(DeadlineError):
    """User code that did not end after it was cancelled, and was left where it stood."""


class Wait:
    """One open wait, in a `with` block of its task or thread. It costs about a microsecond, for there is one for each
    episode."""

    __slots__ = (
        "_cancelling",
        "_timer",
        "_token",
        "cancels",
        "parent",
        "seconds",
        "since",
        "waiter",
        "waits_for",
        "what",
    )

    def __init__(self, what: str, seconds: float | None = None, waits_for: tuple[str, ...] = ()) -> None:
        self.what = what
        self.seconds = seconds
        """How long it may take, where it has a deadline of its own."""
        self.waits_for = waits_for
        """Beginnings of the names of waits that must end before this one can."""
        self.waiter: asyncio.Task[Any] | threading.Thread | None = None
        """None once the wait is over, so that a reference to it keeps no task alive."""
        self.parent: Wait | None = None
        self.cancels = 0
        """How often the waiting task was cancelled because the deadline is over."""
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        parent = _current.get()
        while parent is not None and parent.waiter is None:  # that wait is over by now
            parent = parent.parent
        self.parent = parent
        self.since = time.monotonic()
        if self.seconds is None:
            self.waiter = _current_waiter()
        else:
            self.waiter = task = asyncio.current_task()
            assert task is not None
            self._cancelling = task.cancelling()
            self._timer = task.get_loop().call_later(self.seconds, self._expire)
        _open[self] = None
        self._token = _current.set(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave the registry; a cancellation that the deadline caused becomes a `DeadlineError`."""
        if self._timer is not None:
            self._timer.cancel()
        late = self.cancels and self._uncancel() and isinstance(error, asyncio.CancelledError)
        self.waiter = None
        del _open[self]
        try:  # noqa: SIM105 - a context manager costs more than the wait
            _current.reset(self._token)
        except ValueError:  # thrown away half-way: the garbage collector ran in another context
            pass
        if late:
            raise self._deadline_error() from error

    def _expire(self) -> None:
        """The deadline is over: cancel the waiting task, and again until it leaves."""
        assert isinstance(self.waiter, asyncio.Task)
        self._timer = self.waiter.get_loop().call_later(RECANCEL_SECONDS, self._expire)
        if self.cancels == round(ABANDON_SECONDS / RECANCEL_SECONDS) + 1:  # user code is abandoned by now
            text = "%s does not let itself be cancelled, %g s after its %g s are over: pass asyncio.CancelledError on"
            log.warning(text, self.what, self.cancels * RECANCEL_SECONDS, self.seconds)
        self.cancels += 1
        self.waiter.cancel()

    def _uncancel(self) -> bool:
        """Take all of that back; answers with whether nothing else has cancelled the task meanwhile."""
        assert isinstance(self.waiter, asyncio.Task)
        for _ in range(self.cancels):
            self.waiter.uncancel()
        return self.waiter.cancelling() <= self._cancelling

    def _deadline_error(self) -> DeadlineError:
        return DeadlineError(f"{self.what} took longer than {self.seconds:g} s")


class Registry:
    """Open waits in the order of their beginnings, and how many have come to a good end."""

    def __init__(self) -> None:
        self.open: dict[Wait, None] = {}
        self.progress_count = 0
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


def record_progress() -> None:
    registry.progress_count += 1


async def wait_within(seconds: float, what: str, work: Awaitable[T]) -> T:
    """The result of `work`, or a `DeadlineError` that names what was waited for.

    The same as `asyncio.timeout` around a named wait, in one object and one timer instead of two.
    """
    with Wait(what, seconds):
        result = await work  # bounded: here is the bound
    registry.progress_count += 1
    return result


class UserCall(Wait):
    """As `wait_within`, for user code, which may swallow its cancellation.

    A task cannot be killed, but its work can be left where it stands. `ABANDON_SECONDS` after the deadline, or after
    the caller was cancelled, the work is abandoned: the caller goes on with an `AbandonedError` or its cancellation,
    and the work is not resumed. Timers of the work may still cancel the caller's task, so that task should end soon.

    Wait and driver of the work are one object: at thousands of episodes in flight each further one is felt.
    """

    __slots__ = ("_give_up_timer", "_has_given_up", "_notice", "work")

    def __init__(self, seconds: float, what: str, work: Awaitable[Any]) -> None:
        super().__init__(what, seconds)
        self.work = work
        self._notice: str | None = None
        """The message about it, once it is abandoned."""
        self._give_up_timer: asyncio.TimerHandle | None = None
        self._has_given_up = False

    def __await__(self) -> Generator[Any, None, Any]:
        work: Any = self.work
        driven = work if type(work) is CoroutineType else work.__await__()  # a wrapper less for each episode
        error: BaseException | None = None
        with self:
            task = self.waiter
            assert isinstance(task, asyncio.Task)
            while True:
                before = task.cancelling()
                try:
                    future = driven.send(None) if error is None else driven.throw(error)
                except BaseException as end:
                    if task.cancelling() > before:
                        yield from _undo_cancellations(task, before)
                    if not isinstance(end, StopIteration):
                        raise
                    registry.progress_count += 1
                    return end.value
                while task.cancelling() > before:  # by the work itself: a CancelledError of its own is on its way to it
                    task.uncancel()
                error = None
                try:
                    if future is None or type(future) is asyncio.Future:
                        yield future
                    else:
                        yield from self._wait_until_done(future)
                except GeneratorExit:
                    driven.close()
                    raise
                except BaseException as thrown:
                    error = thrown
                    if self._has_given_up:
                        self._abandon()
                        raise
                    self._give_up_later()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
        super().__exit__(kind, error, trace)
        if self._notice is not None:
            log.warning(self._notice)

    def _deadline_error(self) -> DeadlineError:
        return super()._deadline_error() if self._notice is None else AbandonedError(self._notice)

    def _wait_until_done(self, future: "asyncio.Future[Any]") -> Generator[Any, None, None]:
        """Wait for a task, or for several: unlike a plain future it may outlive its cancellation."""
        future._asyncio_future_blocking = False
        while not future.done():
            end = _DoneSignal(future)
            try:
                yield end
            except asyncio.CancelledError:
                future.remove_done_callback(end.wake)
                if self._has_given_up or not future.cancel():
                    raise
                self._give_up_later()

    def _give_up_later(self) -> None:
        if self._give_up_timer is None:
            task = asyncio.current_task()
            assert task is not None
            # After the deadline the wait itself cancels every `RECANCEL_SECONDS`: the last time must find it given up.
            seconds = ABANDON_SECONDS - (0.5 * RECANCEL_SECONDS if self.cancels else 0.0)
            self._give_up_timer = task.get_loop().call_later(seconds, self._give_up, task, task.cancelling())

    def _give_up(self, task: "asyncio.Task[Any]", cancelling: int) -> None:
        self._give_up_timer = None
        if not task.cancelling() >= cancelling > 0:
            return  # it has dealt with it: a time-out of its own
        self._has_given_up = True
        if not self.cancels:
            task.cancel()

    def _abandon(self) -> None:
        """Keep the work from the garbage collector, and say where it stands."""
        _retain_abandoned(self.work)
        at = user_place(awaited_frames(self.work))
        self._notice = (
            f"{self.what} was cancelled and did not end within {ABANDON_SECONDS:g} s{at and f', at {at}'}: it is "
            "abandoned; let asyncio.CancelledError pass there"
        )


def _undo_cancellations(task: "asyncio.Task[Any]", before: int) -> Generator[Any, None, None]:
    """Take back what user code asked of the caller's task at its end: the caller goes on."""
    while task.cancelling() > before:
        task.uncancel()
    try:
        yield
    except asyncio.CancelledError:
        if task.cancelling() > before:  # the caller was cancelled as well
            raise


class _DoneSignal(asyncio.Future[None]):
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


def _retain_abandoned(work: object) -> None:
    """Hold abandoned work until the process ends. Collected, its coroutine would get a GeneratorExit, swallow that too
    and go on without a loop: for ever, where it catches the error of that as well. A daemon thread's frame is the one
    place that the interpreter does not clear when it shuts down."""
    if not _abandoned:
        threading.Thread(target=_park_thread, args=(_abandoned,), name="abandoned user code", daemon=True).start()
    _abandoned.append(work)


def _park_thread(kept: object) -> None:
    threading.Event().wait()  # unbounded: as long as the process lives


def awaited_frames(coroutine: Any) -> Iterator[FrameType]:
    """The frames of a suspended coroutine, from its own down to what it awaits."""
    for _ in range(100):
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
        if frame.f_code is UserCall.__await__.__code__:
            coroutine = frame.f_locals["self"].work


def named_wait(what: str, waits_for: str | tuple[str, ...] = ()) -> Wait:
    """Name a wait whose deadline is kept by the other side, in a `with` block.

    `waits_for` names that side: open waits whose names begin so are drawn below this one.
    """
    return Wait(what, waits_for=(waits_for,) if isinstance(waits_for, str) else waits_for)


def _current_waiter() -> "asyncio.Task[Any] | threading.Thread":
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:
        return threading.current_thread()


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. The first failure is raised as it is, once all else has been cancelled and has ended."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)  # bounded: as each of the works is
    except BaseException:
        for task in tasks:
            if not task.cancelling():  # twice would cut short how it cleans up
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # bounded: they are cancelled
        raise


class Clock:
    """Tells the time, the machine's own, and bounds waits."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def wait_within(self, seconds: float, what: str, work: Awaitable[T]) -> Awaitable[T]:
        """The result of user code's `work`, or a `DeadlineError` that names what was waited for."""
        return UserCall(seconds, what, work)
