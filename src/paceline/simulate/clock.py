"""Virtual time: an event loop that never waits.

asyncio asks its selector to wait until the next timer is due. Ours says at once that so much time has passed.
Everything that sleeps, times out or is scheduled runs unchanged and in the same order, and eight hours pass as fast as
their events can be handled. Nothing depends on how fast this machine is, so a simulation repeats exactly.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from paceline.errors import PacelineError
from paceline.orchestrator import RealClock

T = TypeVar("T")


class NothingLeft(PacelineError):
    """Every task waits and no timer is set: in real time this would have been a hang."""


class _Leap(selectors.SelectSelector):
    """Looks at its files, and answers that the time has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return []
        if events := super().select(0):
            return events
        if timeout is None:
            raise NothingLeft(f"at second {self.now:,.0f} every task waits and no timer is set")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time leaps from one timer to the next."""

    def __init__(self) -> None:
        self._leap = _Leap()
        super().__init__(self._leap)
        self._clock_resolution = 1e-9  # a leap lands on its timer up to rounding

    def time(self) -> float:
        return self._leap.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """Work for a thread is done at once and takes no virtual time: beside a thread the clock would leap on."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class VirtualClock(RealClock):
    """A loop's own time; sleeps and deadlines are asyncio's, which run on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.time()


def leap(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end in virtual time.

    >>> async def nap() -> float:
    ...     await asyncio.sleep(3600)
    ...     return asyncio.get_running_loop().time()
    >>> leap(nap())
    3600.0
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
