"""Runs an event loop to its end, also where tasks of user code refuse to end."""

import asyncio
import logging
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from paceline.util.user_code import described, is_ctrl_c

FAREWELL_SECONDS = 30.0
"""Time that cancelled tasks get to clean up."""
MOST_THREADS = 2048
T = TypeVar("T")
log = logging.getLogger("paceline.ending")


class StoppedAtOnce(KeyboardInterrupt):
    """The user asked twice for the end of a run."""


def run_to_the_end(main: Coroutine[Any, Any, T], farewell: float = FAREWELL_SECONDS) -> T:
    """`asyncio.run`, which waits for ever for a task that swallows its cancellation: an environment's, say. Here it is
    left behind."""
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        # Threads are made as they are needed. With the usual handful, user code that blocks some by asyncio.to_thread
        # would keep the run's own work waiting in line: reading weights, writing a checkpoint.
        loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS, "paceline"))
        task = loop.create_task(main)
        try:
            return _completed(loop, task)
        except BaseException:
            _let_go(loop, {task}, farewell)  # Ctrl-C came in the middle of something
            raise
    finally:
        _let_go(loop, asyncio.all_tasks(loop), farewell)
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), farewell))
        asyncio.set_event_loop(None)
        loop.close()


def _completed(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    """The result of the main task. Any other task that raises SystemExit or KeyboardInterrupt stops its event loop, so
    that user code which starts one could end the run; the loop goes on, and what awaits that task gets the error."""
    while True:
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt) as error:
            if task.done() or isinstance(error, StoppedAtOnce) or is_ctrl_c(error):
                raise
            log.warning("a task of user code raised %s: raise an ordinary error", described(error))


def _let_go(loop: asyncio.AbstractEventLoop, tasks: set[asyncio.Task[Any]], farewell: float) -> None:
    left = {task for task in tasks if not task.done()}
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=farewell))
