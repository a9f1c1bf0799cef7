"""Ends the process on Ctrl-C while modules are loaded. It is loaded first, and so imports little."""

import os
import signal
from collections.abc import Generator
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
    signal.signal(signal.SIGINT, lambda number, frame: end_interrupted())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_interrupted() -> None:
    os.write(2, b"paceline: stopped\n")
    os._exit(INTERRUPTED)
