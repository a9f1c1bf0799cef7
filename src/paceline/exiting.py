"""Ends a process whose user code has left threads behind, which the interpreter would wait for."""

import os
import sys
import threading
import time
from typing import NoReturn

from paceline.user_code import frames_of, user_place

THREADS_SECONDS = 2.0
"""What threads of user code get to end in, once everything else has ended."""
_exit = os._exit


def exit_process(code: int) -> NoReturn:
    """`sys.exit`, which waits for ever for a thread that is no daemon: `asyncio.to_thread` makes such threads."""
    threading.Thread(target=_leave_threads, args=(code,), name="the end", daemon=True).start()
    sys.exit(code)


def _leave_threads(code: int) -> None:
    time.sleep(THREADS_SECONDS)
    left = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    if left:
        frames = sys._current_frames()
        places = filter(None, (user_place(frames_of(frames.get(thread.ident or -1))) for thread in left))
        at = next((f", one of them at {place}" for place in places), "")
        print(f"paceline: threads of user code did not end, and are left: {len(left)}{at}", file=sys.stderr, flush=True)
        _exit(code)
