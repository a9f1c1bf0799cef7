"""Runs a blocking function in a thread of its own while the caller's thread waits, and hears Ctrl-C."""

import asyncio
import contextvars
import signal
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar

from paceline.cluster.forced_end import STOP_SECONDS
from paceline.cluster.signals import Signals

_LOOK_SECONDS = 1.0
T = TypeVar("T")


def loop_is_running() -> bool:
    """Whether this thread runs an event loop, as a notebook's does, so that it cannot run another."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_in_thread(work: Callable[[], T], signals: Signals) -> T:
    """What `work` returns or raises. The first Ctrl-C stops the run that `signals` belongs to after its step, a second
    one stops it at once, and KeyboardInterrupt is raised when it has stopped."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    # With the caller's context variables: a kernel finds the cell that output belongs to by one of them.
    context = contextvars.copy_context()
    thread = threading.Thread(target=lambda: context.run(run), name="paceline train", daemon=True)
    with _interrupts(signals.interrupt):
        thread.start()
        while not done.done():
            wait([done], _LOOK_SECONDS)
            if signals.asked_twice_since > STOP_SECONDS:  # user code blocks its event loop: the thread is left behind
                raise KeyboardInterrupt
        try:
            return done.result()  # bounded: it is done
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            thread.join()  # bounded: it has set its result


@contextmanager
def _interrupts(heard: Callable[[], None]) -> Generator[None]:
    """Call `heard` on Ctrl-C in place of what this thread does about it: `asyncio.run` cancels its task and goes on, a
    kernel raises KeyboardInterrupt in the middle of the wait."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals go to the main thread, whatever it does
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: heard())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
