"""Starts children, and ends processes: this one at once, this one with its parent, and children for certain.

`python -m paceline.util.process_exit MODULE ARGUMENTS ...` runs a child, which exits with its parent, also while its
imports take seconds.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from _io import _IOBase
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

from paceline.util.interrupts import INTERRUPTED
from paceline.util.user_code import frames_of, user_place

THREADS_SECONDS = 2.0
"""Time that threads of user code get to end, once everything else has ended."""
_LAYERS = {io.FileIO: 0, io.BufferedWriter: 1, io.BufferedRandom: 1, io.BufferedReader: 1, io.TextIOWrapper: 3}
_exit = os._exit


def exit_process(code: int) -> NoReturn:
    """As `sys.exit`: waits for threads, runs what `atexit` holds and closes files. But it does not wait for ever for a
    thread that is no daemon (`asyncio.to_thread` makes such threads), and leaves all memory to the system: with torch
    and transformers imported, the interpreter needs a second to give it back piece by piece."""
    for stream in (sys.stdout, sys.stderr):  # before anything that may end the process first
        with contextlib.suppress(Exception):
            stream.flush()
    threading.Thread(target=_abandon_threads, args=(code,), name="exit", daemon=True).start()
    profiled = sys.getprofile() or sys.gettrace()  # a profiler writes its results after us
    if profiled or ("torch" not in sys.modules and code != INTERRUPTED):
        sys.exit(code)
    with contextlib.suppress(KeyboardInterrupt):  # it ends already
        threading._shutdown()  # ty: ignore[missing-attribute]
        atexit._run_exitfuncs()
        _close_files()
    _exit(code)


def _close_files() -> None:
    """Flush and close open files, as the end of the interpreter does: data may wait in their buffers."""
    gc.unfreeze()  # what is frozen is not listed
    files = [found for found in gc.get_objects() if issubclass(type(found), _IOBase)]
    # A text lies on a buffer, which lies on the file of the system; a compressed one may lie between.
    for file in sorted(files, key=lambda file: _LAYERS.get(type(file), 2), reverse=True):
        with contextlib.suppress(Exception):
            file.flush()
            with contextlib.suppress(Exception):  # a file in memory has no number
                if file.fileno() <= 2:  # the process's own output, which its last lines still need
                    continue
            file.close()


def _abandon_threads(code: int) -> None:
    time.sleep(THREADS_SECONDS)
    left = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    if left:
        frames = sys._current_frames()
        places = filter(None, (user_place(frames_of(frames.get(thread.ident or -1))) for thread in left))
        at = next((f", one of them at {place}" for place in places), "")
        print(f"paceline: threads of user code did not end, and are left: {len(left)}{at}", file=sys.stderr, flush=True)
        _exit(code)


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
        [sys.executable, "-P", "-m", "paceline.util.process_exit", module, *arguments],
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
