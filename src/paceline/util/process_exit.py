"""Ends this process without waiting for threads that do not end, or for memory to be given back."""

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
import time
from _io import _IOBase
from typing import NoReturn

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
