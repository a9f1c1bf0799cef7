"""Ends the process on Ctrl-C while modules are loaded, or calls a handler. Loaded first, and so imports little."""

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


@contextmanager
def interrupt_ends_process() -> Generator[None]:
    """Inside, Ctrl-C ends the process at once. A KeyboardInterrupt may be lost in a library's `__del__`, and where one
    passes through an `exec`, `python -m` ends by the signal, whatever the exit code."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored, as in the background of a shell, or taken
        return
    with on_interrupt(lambda number, frame: end_interrupted()):
        yield


@contextmanager
def on_interrupt(handler: Callable[..., object]) -> Generator[None]:
    """Inside, Ctrl-C calls this signal handler. Signals go to the main thread: in any other nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_interrupted() -> None:
    os.write(2, b"paceline: stopped\n")
    os._exit(INTERRUPTED)
