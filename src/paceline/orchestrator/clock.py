"""The one source of time: all sleeps and deadlines of the orchestrator go through a clock that can be replaced."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Protocol, TypeVar

T = TypeVar("T")


class DeadlineError(TimeoutError):
    """Something took longer than it may, and here is what."""


class Clock(Protocol):
    """Tells the time and bounds waits."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    async def within(self, seconds: float, what: str, work: Awaitable[T]) -> T:
        """The result of `work`, or a `DeadlineError` that names what was waited for."""
        ...


class RealClock:
    """The machine's own time."""

    def now(self) -> float:
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def within(self, seconds: float, what: str, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(seconds) as limit:
                return await work
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineError(f"{what} took longer than {seconds:g} s") from error
