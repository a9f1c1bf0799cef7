"""Ends runs by Ctrl-C: the first ends them after the step under way, a second one at once, whatever tasks refuse to."""

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

from paceline.observe.monitor import Monitor
from paceline.orchestrator import Orchestrator
from paceline.runtime.forced_end import ForcedEnd
from paceline.util.user_code import described, is_ctrl_c

FAREWELL_SECONDS = 30.0
"""Time that cancelled tasks get to clean up."""
MOST_THREADS = 2048
T = TypeVar("T")
log = logging.getLogger("paceline.ending")


class StoppedAtOnce(KeyboardInterrupt):
    """The user asked twice for the end of a run."""


def run_to_the_end(main: Coroutine[Any, Any, T], farewell: float = FAREWELL_SECONDS) -> T:
    """`asyncio.run`, which waits for ever for a task that swallows its cancellation: an environment's, say. Here it is
    left behind."""
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        # Threads are made as they are needed. With the usual handful, user code that blocks some by asyncio.to_thread
        # would keep the run's own work waiting in line: reading weights, writing a checkpoint.
        loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS, "paceline"))
        task = loop.create_task(main)
        try:
            return _completed(loop, task)
        except BaseException:
            _let_go(loop, {task}, farewell)  # Ctrl-C came in the middle of something
            raise
    finally:
        _let_go(loop, asyncio.all_tasks(loop), farewell)
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), farewell))
        asyncio.set_event_loop(None)
        loop.close()


def _completed(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    """The result of the main task. Any other task that raises SystemExit or KeyboardInterrupt stops its event loop, so
    that user code which starts one could end the run; the loop goes on, and what awaits that task gets the error."""
    while True:
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt) as error:
            if task.done() or isinstance(error, StoppedAtOnce) or is_ctrl_c(error):
                raise
            log.warning("a task of user code raised %s: raise an ordinary error", described(error))


def _let_go(loop: asyncio.AbstractEventLoop, tasks: set[asyncio.Task[Any]], farewell: float) -> None:
    left = {task for task in tasks if not task.done()}
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=farewell))


NUMBERS = (signal.SIGINT, signal.SIGTERM)
USER = "stopped by the user"
STOPPING = "stopping after this step, with a checkpoint; press Ctrl-C again to stop at once"


@dataclass(slots=True)
class Stopping:
    """The reason why a run is to end, and the orchestrator to stop."""

    why: str = ""
    _orchestrator: Orchestrator | None = None

    def follow(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        if self.why:
            orchestrator.stop()

    def stop(self, why: str) -> None:
        self.why = self.why or why
        if self._orchestrator is not None:
            self._orchestrator.stop()


@dataclass(slots=True)
class Signals:
    """Hears signals as long as a run is under way, and hands them to all."""

    _runs: list[tuple[Monitor, Stopping]] = field(default_factory=list)
    _why: str = ""
    _heard: bool = False
    """Whether signals come here: they belong to the main thread, and a run in another is stopped by `interrupt`."""
    _interrupts: int = 0
    _signals: int = 0
    _asked_twice_at: float = math.inf
    _stop: Callable[[], object] | None = None
    """What `interrupt` does, once there is something to stop."""
    forced: ForcedEnd | None = None
    """Ends the process where the run does not end."""

    @contextmanager
    def run(self, monitor: Monitor) -> Generator[Stopping]:
        """A run that can be stopped."""
        mine = (monitor, Stopping(self._why))
        self._runs.append(mine)
        if len(self._runs) == 1:
            self._listen()
        try:
            yield mine[1]
        finally:
            self._runs.remove(mine)
            if not self._runs:
                self._ignore()

    def stop(self, why: str, note: str) -> None:
        """All runs end after the step under way, those that are yet to begin too."""
        if self._why:
            return
        self._why = why
        for monitor, stopping in self._runs:
            monitor.note(note)
            stopping.stop(why)

    def attach(self) -> None:
        """`interrupt` stops the task of the caller and the runs it leads."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        if self.forced is not None:
            self.forced.attach()

        def stop() -> None:
            if self._why or not self._runs:  # stopping already, or nothing has begun that a checkpoint could keep
                task.cancel()
            else:
                self.stop(USER, STOPPING)

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
        try:
            for number in NUMBERS:
                # The event loop hears it when it comes to that, and the thread beside it at once.
                asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)
                signal.signal(number, self._at_once)
        except (ValueError, RuntimeError, NotImplementedError):
            return
        self._heard = True

    def _ignore(self) -> None:
        for number in NUMBERS if self._heard else ():
            asyncio.get_running_loop().remove_signal_handler(number)
        self._heard = False

    def _at_once(self, number: int, frame: FrameType | None) -> None:
        if self.forced is not None:
            self.forced.hear(number)

    def _signalled(self, number: int) -> None:
        self._signals += 1
        if self._signals > 1 or self._why:
            raise StoppedAtOnce
        self.stop(USER, STOPPING)
