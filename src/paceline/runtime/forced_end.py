"""Ends the process of a run that user code keeps from ending: by blocking the event loop, or by `os._exit`.

A blocked event loop hears no signal and no deadline, and a function that blocks it cannot be cancelled. Whatever is on
disk survives the end of the process at any moment, so all that is left to do is to say why it ends.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Literal

from paceline.util.deadlines import current_wait, registry
from paceline.util.user_code import is_foreign, open_hooks, user_place

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
CALLS_USERS = tuple(str(_PACKAGE / part) for part in ("util/deadlines.py", "envs", "selfplay", "algorithms"))
"""Where Paceline calls user code, which may be an installed package."""
_exit = os._exit

Status = Literal["interrupted", "failed"]
End = Callable[[Status, str], None]
"""Writes down how the runs of this process ended."""


class ForcedEnd:
    """A thread beside the event loop. It ends the process

    - after a second Ctrl-C or SIGTERM, if the run has not ended by itself in `STOP_SECONDS`;
    - after one SIGTERM, likewise, unless the run does work of its own (a step of training, a checkpoint);
    - when user code has blocked the event loop for `blocked_seconds`.

    Where the event loop is not the main thread's, as in a notebook, the process belongs to others and lives on.
    """

    def __init__(self, end: End, note: Callable[[str], None], blocked_seconds: float) -> None:
        self._write_end, self._note = end, note
        self._limit = blocked_seconds
        self._heard: SimpleQueue[int | None] = SimpleQueue()
        self._signals: list[tuple[int, float]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._asked: float | None = None
        """When the event loop was asked for a sign of life that it has not given yet."""
        self._noted = False
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="forced end", daemon=True)

    @contextmanager
    def watching(self) -> Generator[None]:
        main = threading.current_thread() is threading.main_thread()
        exits = self._told_exit(os.getpid())
        if main:
            self._thread.start()
            os._exit = exits  # ty: ignore[invalid-assignment]
        try:
            yield
        finally:
            if main:
                os._exit = _exit
                self._heard.put(None)

    def attach(self) -> None:
        """Watch the event loop of the caller."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.current_thread()

    def hear(self, number: int) -> None:
        """A signal came; may be called from its handler."""
        self._heard.put(number)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                number = self._heard.get(timeout=_LOOK_SECONDS if self._signals else _CALM_SECONDS)
            except Empty:
                pass
            else:
                if number is None:
                    return
                self._signals.append((number, time.monotonic()))
            now = time.monotonic()
            self._probe(now)
            self._look(now)

    def _look(self, now: float) -> None:
        blocked = 0.0 if self._asked is None else now - self._asked
        at = self._users_place() if blocked >= STUCK_SECONDS else ""
        if self._signals:
            by = f", while {at}, blocked the event loop" if at else ""
            if self._due(now, bool(at)):
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

    def _due(self, now: float, users: bool) -> bool:
        if len(self._signals) > 1:
            return now - self._signals[1][1] >= STOP_SECONDS
        number, since = self._signals[0]
        if number != signal.SIGTERM or now - since < STOP_SECONDS:
            return False
        hangs = any(time.monotonic() - began >= STUCK_SECONDS for _, began in open_hooks())
        return users or hangs or not any(wait.what in OWN_WORK for wait in registry.waits())

    def _probe(self, now: float) -> None:
        if self._loop is None or self._asked is not None:
            return
        self._asked = now
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # closed: nothing can block it any more
            self._loop = self._asked = None

    def _answer(self) -> None:
        self._asked = None

    def _users_place(self) -> str:
        """Where the event loop's thread stands in user code; empty where that was not the last to be called."""
        thread = self._loop_thread
        frame = sys._current_frames().get(thread.ident or -1) if thread is not None else None
        return _users_place(frame)

    # -- the end ----------------------------------------------------------------------------------------------------

    def end(self, status: Status, message: str, code: int) -> None:
        """Say why, and end the process, however many locks the blocked thread holds."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # unbounded: another thread is ending the process
        words = threading.Thread(target=self._say, args=(status, message), name="last words", daemon=True)
        words.start()
        words.join(FLUSH_SECONDS)
        _exit(code)

    def _say(self, status: Status, message: str) -> None:
        try:
            self._write_end(status, message)
        finally:
            print(f"paceline: {message}", file=sys.stderr)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()

    def _told_exit(self, process: int) -> Callable[[int], None]:
        """In the place of `os._exit`, which a child that was forked calls as ever."""

        def told_exit(status: int) -> None:
            if os.getpid() != process:
                _exit(status)
            wait = current_wait()
            where = f" in {wait}" if wait else ""
            at = _users_place(sys._getframe(1))
            self.end(
                "failed",
                f"user code ended the process{where}, by os._exit({status}){at and f' at {at}'}: raise an error, which "
                "ends its episode alone",
                1,
            )

        return told_exit


def _users_place(innermost: FrameType | None) -> str:
    """Where user code stands that Paceline called last; empty if the stack's innermost frames are Paceline's own."""
    frames: list[FrameType] = []
    while innermost is not None and not (file := innermost.f_code.co_filename).startswith(f"{_PACKAGE}{os.sep}"):
        frames.append(innermost)
        innermost = innermost.f_back
    if innermost is None:
        return ""
    others = [is_foreign] if file.startswith(CALLS_USERS) else []
    return user_place(frames[::-1], *others)
