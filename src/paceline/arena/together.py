"""Runs coroutines concurrently; when one fails, the others are cancelled."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. The first failure is raised as it is, once everything else has been cancelled and ended:
    nothing goes on speaking after its episode is over."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)  # bounded: as each of the works is
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # bounded: they are cancelled
