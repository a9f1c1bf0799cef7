"""An event loop that ends, whoever refuses to."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

FAREWELL_SECONDS = 30.0
"""What tasks get to clean up in after they were cancelled."""
T = TypeVar("T")


def run_to_the_end(main: Coroutine[Any, Any, T], farewell: float = FAREWELL_SECONDS) -> T:
    """`asyncio.run`, which waits for ever for a task that swallows its cancellation: an environment's, say. Here it is
    left behind."""
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        task = loop.create_task(main)
        try:
            return loop.run_until_complete(task)
        except BaseException:
            _let_go(loop, {task}, farewell)  # Ctrl-C came in the middle of something
            raise
    finally:
        _let_go(loop, asyncio.all_tasks(loop), farewell)
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), farewell))
        asyncio.set_event_loop(None)
        loop.close()


def _let_go(loop: asyncio.AbstractEventLoop, tasks: set[asyncio.Task[Any]], farewell: float) -> None:
    left = {task for task in tasks if not task.done()}
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=farewell))
