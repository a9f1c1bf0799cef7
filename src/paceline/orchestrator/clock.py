"""Provides the replaceable clock that all sleeps and deadlines of the orchestrator go through."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from paceline.util.deadlines import DeadlineError, abandonable

__all__ = ["Clock", "DeadlineError", "RealClock"]

T = TypeVar("T")


class Clock(Protocol):
    """Tells the time and bounds waits."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def within(self, seconds: float, what: str, work: Awaitable[T]) -> Awaitable[T]:
        """The result of user code's `work`, or a `DeadlineError` that names what was waited for."""
        ...


class RealClock:
    """The machine's own time."""

    def now(self) -> float:
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def within(self, seconds: float, what: str, work: Awaitable[T]) -> Awaitable[T]:
        return abandonable(seconds, what, work)
