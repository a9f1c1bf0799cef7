"""A simulated engine: many GPUs that decode at the pace their load allows.

All running requests advance at one pace, 1 / seconds of a decode step, which changes whenever one comes or goes. So the
engine keeps one number, the tokens that a request running since the start would have sampled. A request is done when
that number has grown by its length, and one timer, for the request that is done first, drives everything. A reply has
one token for each policy version it was sampled under, whose *id* is how many tokens that were: staleness is exact, the
trainer can count, and a reply of 30,000 tokens takes a few bytes.

Time is virtual: asyncio asks its selector to wait until the next timer is due, and ours says at once that so much time
has passed. Everything that sleeps, times out or is scheduled runs unchanged and in the same order. Nothing depends on
how fast this machine is, so a simulation repeats exactly.
"""

import asyncio
import heapq
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from paceline.engine import Completion, EngineStats, GenerateRequest
from paceline.engine.base import EngineLimits
from paceline.errors import PacelineError
from paceline.orchestrator import Clock
from paceline.weights.update import ServedPolicy, WeightUpdate
from simulator.cost import Lengths


@dataclass(order=True, slots=True)
class Running:
    """A request on the GPUs, ordered by when it will be done."""

    done_at: float
    number: int
    length: int = field(compare=False)
    answer: "asyncio.Future[Completion]" = field(compare=False)


class SimulatedEngine:
    """`slots` requests at once; the others wait, the oldest ticket first."""

    def __init__(
        self,
        slots: int,
        step_seconds: Callable[[int], float],
        lengths: Lengths,
        transfer: float = 0.0,
        pause: float = 0.0,
    ) -> None:
        self.version = 0
        self.tokens = 0
        self._slots, self._step_seconds, self._lengths = slots, step_seconds, lengths
        self._transfer, self._pause = transfer, pause
        self._waiting: list[tuple[int, int, int, asyncio.Future[Completion]]] = []
        self._running: list[Running] = []
        self._numbers = count()
        self._reached, self._at, self._pace = 0.0, 0.0, 0.0
        """Tokens since the beginning, at this moment, and how many a second from then on."""
        self._since: deque[tuple[float, int]] = deque([(0.0, 0)])
        """The tokens reached when each version came."""
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self.busy_seconds = 0.0

    async def generate(self, request: GenerateRequest, listener: object = None) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        length = min(request.max_tokens, self._lengths.draw(request.noise))
        heapq.heappush(self._waiting, (request.order, next(self._numbers), length, answer))
        if len(self._running) < self._slots:
            self._advance()
            self._admit()
        try:
            return await answer  # bounded: by the pool's deadline, in virtual time
        except asyncio.CancelledError:
            self._release_slot(answer)
            raise

    async def load_weights(self, update: WeightUpdate) -> float:
        """The weights travel while decoding goes on; it stands still while they are put in place."""
        await asyncio.sleep(self._transfer)
        self._set_paused(True)
        await asyncio.sleep(self._pause)
        self.version = update.version
        self._since.append((self._reached, update.version))
        begun = min((one.done_at - one.length for one in self._running), default=self._reached)
        while len(self._since) > 1 and self._since[1][0] <= begun:  # older than every running request
            self._since.popleft()
        self._set_paused(False)
        return self._pause

    async def policy(self) -> ServedPolicy:
        return ServedPolicy(self.version, "")

    async def limits(self) -> EngineLimits:
        return EngineLimits(max_context=1 << 40, vocabulary=1 << 40)

    async def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            capacity=self._slots,
            tokens=self.tokens,
            busy_seconds=self.busy_seconds,
        )

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, model: str = ""
    ) -> list[list[float]]:
        return [[0.0] * len(sequence) for sequence in sequences]

    def start(self) -> None: ...

    def close(self) -> None: ...

    # -- time -------------------------------------------------------------------------------------------------------

    def _set_paused(self, still: bool) -> None:
        self._advance()
        self._paused = still
        self._set_pace()

    def _advance(self) -> None:
        """Up to now."""
        now = asyncio.get_running_loop().time()
        if self._running and not self._paused:
            self.busy_seconds += now - self._at
        self._reached += self._pace * (now - self._at)
        self._at = now

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            _, number, length, answer = heapq.heappop(self._waiting)
            if not answer.cancelled():
                heapq.heappush(self._running, Running(self._reached + length, number, length, answer))
        self._set_pace()

    def _release_slot(self, answer: "asyncio.Future[Completion]") -> None:
        """Free the slot of a cancelled request. One that had none is skipped when its turn comes."""
        left = [one for one in self._running if one.answer is not answer]
        if len(left) < len(self._running):
            self._advance()
            self._running[:] = left
            heapq.heapify(self._running)
            self._admit()

    def _set_pace(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._running or self._paused:
            self._pace = 0.0
            return
        self._pace = 1 / self._step_seconds(len(self._running))
        wait = max(0.0, self._running[0].done_at - self._reached) / self._pace
        self._timer = asyncio.get_running_loop().call_later(wait, self._answer)

    def _answer(self) -> None:
        """Answer every request whose last token is sampled."""
        self._advance()
        while self._running and self._running[0].done_at <= self._reached + 1e-6:
            done = heapq.heappop(self._running)
            if not done.answer.cancelled():
                self.tokens += done.length
                counts, versions = self._by_version(done.done_at - done.length, done.length)
                finish = "length" if done.length >= self._lengths.longest else "stop"
                logprobs = [-1.0] * len(counts)
                completion = Completion(token_ids=counts, logprobs=logprobs, versions=versions, finish=finish)
                done.answer.set_result(completion)
        self._admit()

    def _by_version(self, begun: float, length: int) -> tuple[list[int], list[int]]:
        """How many of a reply's tokens each version sampled."""
        counts, versions, left = [], [], length
        for reached, version in reversed(self._since):
            share = left if reached <= begun else left - max(0, min(left, round(reached - begun)))
            if share:
                counts.append(share)
                versions.append(version)
                left -= share
            if not left:
                break
        return counts[::-1], versions[::-1]


T = TypeVar("T")


class SimulationDeadlock(PacelineError):
    """Every task waits and no timer is set: in real time this would have been a hang."""


class _VirtualSelector(selectors.SelectSelector):
    """Looks at its files, and answers that the time has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return []
        if events := super().select(0):
            return events
        if timeout is None:
            raise SimulationDeadlock(f"at second {self.now:,.0f} every task waits and no timer is set")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time leaps from one timer to the next."""

    def __init__(self) -> None:
        self._selector = _VirtualSelector()
        super().__init__(self._selector)
        self._clock_resolution = 1e-9  # a leap lands on its timer up to rounding

    def time(self) -> float:
        return self._selector.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """Work for a thread is done at once and takes no virtual time: beside a thread the clock would leap on."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class VirtualClock(Clock):
    """A loop's own time; sleeps and deadlines are asyncio's, which run on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.time()


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end in virtual time.

    >>> async def nap() -> float:
    ...     await asyncio.sleep(3600)
    ...     return asyncio.get_running_loop().time()
    >>> run_virtual(nap())
    3600.0
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
