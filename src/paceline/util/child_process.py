"""Starts child processes that exit with their parent, and ends them for certain.

`python -m paceline.util.child_process MODULE ARGUMENTS ...` runs a child, which exits with its parent, also while its
imports take seconds.
"""

import contextlib
import ctypes
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

WITH_PARENT = "PACELINE_WITH_PARENT"
"""Holds the parent's process id."""
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Exit when the parent process dies, where `WITH_PARENT` is set. Outside Linux the parent must end its commands."""
    parent = os.environ.get(WITH_PARENT, "")
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != parent:
        sys.exit(1)  # it was gone before the kernel could be told


def free_port(host: str = "127.0.0.1") -> int:
    """A port that a child can listen on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


ORPHANED = 125
"""Exit code of a process whose parent is gone. Nothing needs to be saved then: the run resumes from its checkpoint."""


def exit_with_stdin() -> None:
    """From now on exit when the parent's end of standard input closes. What was sent stays there to be read."""
    closed = select.poll()
    closed.register(sys.stdin.fileno(), 0)  # the end of the other side is reported even so

    def follow() -> None:
        closed.poll()  # unbounded: as long as the parent lives
        os._exit(ORPHANED)

    threading.Thread(target=follow, name="lifeline", daemon=True).start()


def start_child(
    module: str,
    *arguments: str,
    line: bytes,
    stdout: IO[Any] | int | None,
    stderr: IO[Any],
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Run a module in a session of its own, away from Ctrl-C. It reads `line` from standard input, which stays open; it
    exits when that closes."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "paceline.util.child_process", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=env,
        pass_fds=pass_fds,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        pass  # dead already: the next poll will see it
    except BaseException:
        process.kill()
        raise
    return process


def end_child(process: "subprocess.Popen[bytes]", seconds: float, killed_seconds: float) -> None:
    """Wait for a child that is about to end, or kill it, though a driver may hold even that back; close its pipe."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(killed_seconds)
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # what it never read
            process.stdin.close()


if __name__ == "__main__":
    exit_with_stdin()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
