"""Exits when the parent process dies (Linux)."""

import ctypes
import os
import signal
import sys

WITH_PARENT = "PACELINE_WITH_PARENT"
"""Holds the parent's process id."""
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Does nothing where `WITH_PARENT` is not set, and outside Linux, where the parent must end its commands."""
    parent = os.environ.get(WITH_PARENT, "")
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != parent:
        sys.exit(1)  # it was gone before the kernel could be told
