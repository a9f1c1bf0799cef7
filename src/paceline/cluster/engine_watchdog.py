"""Ends a process whose engine has failed for good, so that its supervisor restarts it.

The thread that computes is gone by then, and with it perhaps the device: nothing in this process can bring it back. A
process that lived on would refuse every request, for ever.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from paceline.inference.base import EngineError

FAREWELL_SECONDS = 1.0
"""For answers that are under way when the engine fails: every waiting request has just been failed."""
MOST_SECONDS = 30.0
"""For those that are still not sent by then: a busy machine is slow."""


class Mortal(Protocol):
    """An engine whose thread may fail."""

    def outlive(self) -> BaseException | None: ...


def watch(engine: Mortal, then: Callable[[BaseException], None]) -> None:
    """Call `then`, on a thread of its own, once the engine has failed; never if it is only closed."""

    def wait() -> None:
        if (cause := engine.outlive()) is not None:
            then(cause)

    threading.Thread(target=wait, name="paceline-survivor", daemon=True).start()


def lost(engine: Mortal) -> Callable[[], Awaitable[EngineError]]:
    """Waits in an event loop for the failure of an engine."""

    async def failed() -> EngineError:
        loop = asyncio.get_running_loop()
        end: asyncio.Future[BaseException] = loop.create_future()

        def tell(cause: BaseException) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(lambda: end.done() or end.set_result(cause))

        watch(engine, tell)
        cause = await end  # unbounded: as long as the engine serves
        return EngineError(f"the engine stopped: {cause}")

    return failed


def leave(cause: BaseException, waits: Callable[[], bool] = lambda: False) -> None:
    """End this process, after a moment for the last answers, and longer while a client `waits` for one. Nothing is
    unwound: threads of a broken device may hang."""
    end = time.monotonic() + MOST_SECONDS
    time.sleep(FAREWELL_SECONDS)
    while waits() and time.monotonic() < end:
        time.sleep(0.05)  # bounded: by MOST_SECONDS
    print(f"paceline: the engine stopped: {type(cause).__name__}: {cause}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
