"""Ends runs: by Ctrl-C, by `interrupt` from another thread, and where user code keeps the process from ending.

The first Ctrl-C ends runs after the step under way, a second one at once, whatever tasks refuse to. A blocked event
loop hears no signal and no deadline, and a function that blocks it cannot be cancelled. Whatever is on disk survives
the end of the process at any moment, so all that is left to do then is to say why it ends.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Literal, TypeVar

from paceline.observe.monitor import Monitor
from paceline.orchestrator import Orchestrator
from paceline.util.deadlines import current_wait, registry
from paceline.util.user_code import describe_error, is_ctrl_c, is_foreign_frame, open_hooks, user_place

STOP_SECONDS = 3.5
"""A run that was told to stop at once gets this long to end in good order."""
FLUSH_SECONDS = 1.0
"""Time for the last messages of a run."""
STUCK_SECONDS = 1.5
"""From here on an event loop counts as blocked, and a hook as hanging."""
OWN_WORK = ("training on the batch", "publishing the weights", "writing a checkpoint")
"""Waits that a single SIGTERM does not cut short: they are Paceline's own, and end."""
_LOOK_SECONDS = 0.25
_CALM_SECONDS = 1.0
_PACKAGE = Path(__file__).resolve().parent.parent
USER_CODE_CALLERS = tuple(str(_PACKAGE / part) for part in ("util/deadlines.py", "envs", "selfplay", "algorithms"))
"""Where Paceline calls user code, which may be an installed package."""
_exit = os._exit

Status = Literal["interrupted", "failed"]
End = Callable[[Status, str], None]
"""Writes down how the runs of this process ended."""


class ForcedExit:
    """A thread beside the event loop. It ends the process

    - after a second Ctrl-C or SIGTERM, if the run has not ended by itself in `STOP_SECONDS`;
    - after one SIGTERM, likewise, unless the run does work of its own (a step of training, a checkpoint);
    - when user code has blocked the event loop for `blocked_seconds`.

    Where the event loop is not the main thread's, as in a notebook, the process belongs to others and lives on.
    """

    def __init__(self, end: End, note: Callable[[str], None], blocked_seconds: float) -> None:
        self._write_end, self._note = end, note
        self._limit = blocked_seconds
        self._signal_queue: SimpleQueue[int | None] = SimpleQueue()
        self.on_signal: Callable[[int], None] = self._signal_queue.put
        """A signal came; may be called from its handler."""
        self._signals: list[tuple[int, float]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._pinged_at: list[float] = []
        """When the event loop was asked for a sign of life; empty once it has given it."""
        self._noted = False
        self._process = os.getpid()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="forced end", daemon=True)

    @contextmanager
    def watching(self) -> Generator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._thread.start()
        os._exit = self._exit_of_user_code  # ty: ignore[invalid-assignment]
        try:
            yield
        finally:
            os._exit = _exit
            self._signal_queue.put(None)

    def attach(self) -> None:
        """Watch the event loop of the caller."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.current_thread()

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with contextlib.suppress(Empty):
                number = self._signal_queue.get(timeout=_LOOK_SECONDS if self._signals else _CALM_SECONDS)
                if number is None:
                    return
                self._signals.append((number, time.monotonic()))
            self._check(time.monotonic())

    def _check(self, now: float) -> None:
        if self._loop is not None and not self._pinged_at:
            self._pinged_at.append(now)
            try:
                self._loop.call_soon_threadsafe(self._pinged_at.clear)
            except RuntimeError:  # closed: nothing can block it any more
                self._loop = None
                self._pinged_at.clear()
        pinged_at = next(iter(self._pinged_at), now)  # the event loop may clear the list at any moment
        blocked = now - pinged_at
        at = ""
        if blocked >= STUCK_SECONDS and self._loop_thread is not None:
            at = _users_place(sys._current_frames().get(self._loop_thread.ident or -1))
        if self._signals:
            by = f", while {at}, blocked the event loop" if at else ""
            if self._must_exit(now, bool(at)):
                self.end("interrupted", f"stopped by the user{by}", 130)
            elif at and not self._noted:
                self._noted = True
                self._note(f"the event loop is blocked by {at}: press Ctrl-C again to stop at once")
        if at and self._limit and blocked >= self._limit:
            self.end(
                "failed",
                f"user code has blocked the event loop for {blocked:.0f} s at {at} (breaker.blocked_seconds = "
                f"{self._limit:g}): await what takes time there, with asyncio.sleep or an async client, or call it by "
                "asyncio.to_thread",
                1,
            )

    def _must_exit(self, now: float, users: bool) -> bool:
        if len(self._signals) > 1:
            return now - self._signals[1][1] >= STOP_SECONDS
        number, since = self._signals[0]
        if number != signal.SIGTERM or now - since < STOP_SECONDS:
            return False
        hangs = any(time.monotonic() - began >= STUCK_SECONDS for _, began in open_hooks())
        return users or hangs or not any(wait.what in OWN_WORK for wait in registry.waits())

    # -- the end ----------------------------------------------------------------------------------------------------

    def end(self, status: Status, message: str, code: int) -> None:
        """Say why, and end the process, however many locks the blocked thread holds."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # unbounded: another thread is ending the process
        words = threading.Thread(target=self._report_end, args=(status, message), name="last words", daemon=True)
        words.start()
        words.join(FLUSH_SECONDS)
        _exit(code)

    def _report_end(self, status: Status, message: str) -> None:
        try:
            self._write_end(status, message)
        finally:
            print(f"paceline: {message}", file=sys.stderr)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()

    def _exit_of_user_code(self, status: int) -> None:
        """In the place of `os._exit`, which a child that was forked calls as ever."""
        if os.getpid() != self._process:
            _exit(status)
        wait = current_wait()
        where = f" in {wait}" if wait else ""
        place = _users_place(sys._getframe(1))
        at = f" at {place}" if place else ""
        self.end(
            "failed",
            f"user code ended the process{where}, by os._exit({status}){at}: raise an error, which "
            "ends its episode alone",
            1,
        )


def _users_place(innermost: FrameType | None) -> str:
    """Where user code stands that Paceline called last; empty if the stack's innermost frames are Paceline's own."""
    frames: list[FrameType] = []
    while innermost is not None and not (file := innermost.f_code.co_filename).startswith(f"{_PACKAGE}{os.sep}"):
        frames.append(innermost)
        innermost = innermost.f_back
    if innermost is None:
        return ""
    others = [is_foreign_frame] if file.startswith(USER_CODE_CALLERS) else []
    return user_place(frames[::-1], *others)


FAREWELL_SECONDS = 30.0
"""Time that cancelled tasks get to clean up."""
MOST_THREADS = 2048
T = TypeVar("T")
log = logging.getLogger("paceline.ending")


class StoppedAtOnce(KeyboardInterrupt):
    """The user asked twice for the end of a run."""


def run_until_complete(main: Coroutine[Any, Any, T], farewell: float = FAREWELL_SECONDS) -> T:
    """As `asyncio.run`, but leaves tasks behind that swallow their cancellation: an environment's, say."""
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        # Threads are made as they are needed. With the usual handful, user code that blocks some by asyncio.to_thread
        # would keep the run's own work waiting in line: reading weights, writing a checkpoint.
        loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS, "paceline"))
        task = loop.create_task(main)
        try:
            return _run_main_task(loop, task)
        except BaseException:
            _cancel_tasks(loop, {task}, farewell)  # Ctrl-C came in the middle of something
            raise
    finally:
        _cancel_tasks(loop, asyncio.all_tasks(loop), farewell)
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), farewell))
        asyncio.set_event_loop(None)
        loop.close()


def _run_main_task(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    """The result of the main task. Any other task that raises SystemExit or KeyboardInterrupt stops its event loop, so
    that user code which starts one could end the run; the loop goes on, and what awaits that task gets the error."""
    while True:
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt) as error:
            if task.done() or isinstance(error, StoppedAtOnce) or is_ctrl_c(error):
                raise
            log.warning("a task of user code raised %s: raise an ordinary error", describe_error(error))


def _cancel_tasks(loop: asyncio.AbstractEventLoop, tasks: set[asyncio.Task[Any]], farewell: float) -> None:
    left = {task for task in tasks if not task.done()}
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=farewell))


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED_BY_USER = "stopped by the user"
STOPPING = "stopping after this step, with a checkpoint; press Ctrl-C again to stop at once"


@dataclass(slots=True)
class Signals:
    """Hears signals as long as a run is under way, and hands them to all."""

    why: str = ""
    """Why runs are to end."""
    _runs: dict[Monitor, Orchestrator | None] = field(default_factory=dict)
    _interrupts: int = 0
    _asked_twice_at: float = math.inf
    _stop: Callable[[], object] | None = None
    """What `interrupt` does, once there is something to stop."""
    forced: ForcedExit | None = None
    """Ends the process where the run does not end."""

    @contextmanager
    def run(self, monitor: Monitor) -> Generator[None]:
        self._runs[monitor] = None
        if len(self._runs) == 1:
            self._listen()
        try:
            yield
        finally:
            del self._runs[monitor]
            if not self._runs:
                for number in STOP_SIGNALS:
                    asyncio.get_running_loop().remove_signal_handler(number)

    def follow(self, monitor: Monitor, orchestrator: Orchestrator) -> None:
        """Stop this orchestrator when the monitor's run is to end."""
        self._runs[monitor] = orchestrator
        if self.why:
            orchestrator.stop()

    def stop(self, why: str, note: str) -> None:
        """All runs end after the step under way, those that are yet to begin too."""
        if self.why:
            return
        self.why = why
        for monitor, orchestrator in self._runs.items():
            monitor.note(note)
            if orchestrator is not None:
                orchestrator.stop()

    def attach(self) -> None:
        """`interrupt` stops the task of the caller and the runs it leads."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        if self.forced is not None:
            self.forced.attach()

        def stop() -> None:
            if self.why or not self._runs:  # stopping already, or nothing has begun that a checkpoint could keep
                task.cancel()
            else:
                self.stop(STOPPED_BY_USER, STOPPING)

        self.on_interrupt(lambda: loop.call_soon_threadsafe(stop))

    def on_interrupt(self, stop: Callable[[], object]) -> None:
        """Set what `interrupt` does, from any thread; it is done at once if `interrupt` was called before."""
        self._stop = stop
        if self._interrupts:
            stop()

    def interrupt(self) -> None:
        """Ctrl-C, from another thread than the run's: the first call ends the run after its step, a second at once."""
        self._interrupts += 1
        if self._interrupts == 2:
            self._asked_twice_at = time.monotonic()
        if self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
                self._stop()

    @property
    def asked_twice_since(self) -> float:
        """Seconds since the second call of `interrupt`; negative before."""
        return time.monotonic() - self._asked_twice_at

    def _listen(self) -> None:
        def at_once(number: int, frame: FrameType | None) -> None:
            if self.forced is not None:
                self.forced.on_signal(number)

        # Signals belong to the main thread; a run in another is stopped by `interrupt`.
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            for number in STOP_SIGNALS:
                # The event loop hears it when it comes to that, and the thread beside it at once.
                asyncio.get_running_loop().add_signal_handler(number, self._signalled)
                signal.signal(number, at_once)

    def _signalled(self) -> None:
        if self.why:
            raise StoppedAtOnce
        self.stop(STOPPED_BY_USER, STOPPING)
