"""Tracks which engines of a pool serve and with which weights, and picks one for each request."""

import asyncio
import dataclasses
import logging
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from paceline.engine.base import Engine
from paceline.errors import EngineError, PartialUpdateError, Unreachable, UpdateLost
from paceline.util.rate_limited_logger import RateLimitedLogger
from paceline.weights.update import WeightUpdate

PREFIX_BLOCK = 32
"""Tokens per block: a prompt is remembered by each of its prefixes of whole blocks."""
MOST_PREFIXES = 1 << 16
AFFINITY_SLACK = 0.25
"""How much busier than the least loaded engine, in parts of its capacity, the one with the prefix may be."""


class PoolMember:
    """An engine as the pool sees it."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.engine = engine
        self.recovers_itself = isinstance(engine, RejoiningEngine)
        self.name = engine.name if isinstance(engine, RejoiningEngine) else f"engine {number}"
        self.unanswered = 0.0
        """Requests under way, by weight."""
        self.capacity = 1
        self.context: int | None = None
        """Most tokens it takes; None until it was asked."""
        self.trouble: EngineError | None = None
        """Why it is set aside; None while it serves."""

    @property
    def load(self) -> float:
        """How full it would be with one request more."""
        return (self.unanswered + 1) / self.capacity


def choose_member(candidates: Sequence[PoolMember], known: PoolMember | None = None) -> PoolMember:
    """The engine that has the prompt's prefix cached, unless it is `AFFINITY_SLACK` busier than the least busy one."""
    least = min(candidates, key=lambda member: member.load)
    if known in candidates and known is not None and known.load <= least.load + AFFINITY_SLACK:
        return known
    return least


class PrefixAffinity:
    """Remembers which engine last computed a prefix of a prompt.

    Only a prefix of at least half of the prompt counts: all prompts share the first tokens of a chat template.
    """

    def __init__(self) -> None:
        self._members: OrderedDict[int, PoolMember] = OrderedDict()

    def find(self, prompt: Sequence[int]) -> PoolMember | None:
        keys = _prefix_keys(prompt)
        for known in range(len(keys), 0, -1):
            if known * PREFIX_BLOCK * 2 < len(prompt):
                return None
            if member := self._members.get(keys[known - 1]):
                return member
        return None

    def record(self, prompt: Sequence[int], member: PoolMember) -> None:
        for key in _prefix_keys(prompt):
            self._members[key] = member
            self._members.move_to_end(key)
        while len(self._members) > MOST_PREFIXES:
            self._members.popitem(last=False)

    def clear(self) -> None:
        """New weights: keys and values of the old ones are never shared with new requests."""
        self._members.clear()


def _prefix_keys(prompt: Sequence[int]) -> list[int]:
    """One key per prefix of whole blocks, shortest first."""
    keys, key = [], 0
    for end in range(PREFIX_BLOCK, len(prompt) + 1, PREFIX_BLOCK):
        key = hash((key, tuple(prompt[end - PREFIX_BLOCK : end])))
        keys.append(key)
    return keys


CHECK_SECONDS = 10.0
PUBLISH_SECONDS = 900.0
FIRST_DELAY, MOST_DELAY = 0.05, 2.0
QUIET_ATTEMPTS = 15
"""About twenty seconds: an engine that is started again takes that long."""
log = logging.getLogger("paceline.pool")
MALFORMED_ANSWER = (LookupError, TypeError, ValueError, AttributeError)
"""Errors that reading a malformed answer of a remote engine raises."""
T = TypeVar("T")


@runtime_checkable
class RejoiningEngine(Protocol):
    """An engine that may come back after it was gone, perhaps without the weights it had."""

    name: str

    async def store_update(self, update: WeightUpdate) -> WeightUpdate:
        """A copy that can be sent again, to this engine and to others, when one of them comes back."""


class EngineRegistry:
    """The members of a pool, in service or set aside.

    in service -> (a failure, and no answer or other weights when asked) -> set aside
               -> (asked again, with back-off) answers -> gets the last updates -> in service

    An engine of this process does not come back by itself: the pool does not wait for it, and only the next update can
    bring it back into service.
    """

    def __init__(self, engines: Sequence[Engine], jitter: Callable[[], float] = random.random) -> None:
        self.members = [PoolMember(engine, number) for number, engine in enumerate(engines)]
        self._update_keeper = next((engine for engine in engines if isinstance(engine, RejoiningEngine)), None)
        self._updates: dict[str | None, WeightUpdate] = {}
        """The last update of the base (None) and of each adapter. Replaced, never changed: its identity is its age."""
        self.published: dict[str, int] = {}
        """The version of the policy ("") and of each adapter that every serving engine has applied."""
        self._recoveries: dict[PoolMember, asyncio.Task[None]] = {}
        self._size_check: asyncio.Future[list[None]] | None = None
        self._publishing = 0
        self._jitter = jitter
        self._warnings = RateLimitedLogger(log)

    @property
    def serving(self) -> list[PoolMember]:
        return [member for member in self.members if member.trouble is None]

    @property
    def is_hopeless(self) -> bool:
        """No engine serves and none will: an engine of this process comes back only by an update."""
        return not self.serving and not self._publishing and not any(member.recovers_itself for member in self.members)

    @property
    def trouble(self) -> EngineError:
        causes = "; ".join(f"{member.name}: {member.trouble}" for member in self.members)
        return EngineError(f"no engine is left: {causes}")

    def backoff_delay(self, attempt: int) -> float:
        """Exponential back-off, shortened by up to half so that those who wait do not return all at once."""
        return min(MOST_DELAY, FIRST_DELAY * 2 ** min(attempt, 30)) * (1 - self._jitter() / 2)

    def add(self, engine: Engine) -> None:
        """A further engine, which serves once it answers and holds the current weights."""
        member = PoolMember(engine, len(self.members))
        member.trouble = EngineError("it has not answered yet")
        self._update_keeper = self._update_keeper or (engine if isinstance(engine, RejoiningEngine) else None)
        self.members.append(member)
        self._recoveries[member] = asyncio.ensure_future(self._recover(member))

    async def learn_sizes(self) -> None:
        """Ask each engine for its context and capacity, once. With one engine there is nothing to choose."""
        if len(self.members) > 1:
            self._size_check = self._size_check or asyncio.gather(*map(self._learn_size, self.members))
            await asyncio.shield(self._size_check)  # bounded: by CHECK_SECONDS

    async def set_aside_if_failing(self, member: PoolMember) -> bool:
        """Whether an engine that failed a request is out of order; if so it is set aside."""
        if member.trouble is not None:
            return True
        try:
            policy = await _call_engine(member, CHECK_SECONDS, member.engine.policy())
        except EngineError as error:
            self._set_aside(member, error)
            return True
        current = [update.version for name, update in self._updates.items() if not name]
        is_partial = policy.version < 0  # an update broke off there, or none came yet: it must be sent all weights
        if is_partial or (current and policy.version not in current and not self._publishing):
            served = "no whole version" if is_partial else f"version {policy.version}"
            self._set_aside(member, EngineError(f"it serves {served}, not version {max(current, default=0)}"))
            return True
        return False

    def set_aside_if_restarted(self, member: PoolMember, model: str, error: EngineError) -> bool:
        """Whether an engine that does not know a model has been given it: then it was restarted, and is set aside."""
        restarted = model in self._updates and member.recovers_itself
        if restarted:
            self._set_aside(member, error)
        return restarted

    async def publish(self, update: WeightUpdate) -> float:
        """Every engine in service takes the update, as do those of this process that were set aside; answers with the
        longest pause.

        One that does not is set aside. If all refuse, the update is at fault: the weights before it stay the current
        ones and the first refusal is raised. If all are gone, this waits for one to come back with the new weights.
        """
        if self._update_keeper is not None:
            update = kept = await self._update_keeper.store_update(update)
        else:  # nothing is ever sent again, and what is not kept takes no memory
            kept = dataclasses.replace(update, tensors={})
        before = self._updates
        name = None if update.adapter is None else update.adapter.name
        self._updates = dict(sorted((before | {name: kept}).items(), key=lambda item: item[0] is not None))
        # Only the next update can bring back an engine of this process.
        targets = [m for m in self.members if m.trouble is None or not m.recovers_itself]
        self._publishing += 1
        try:
            answers = await asyncio.gather(*(self._send(member, update) for member in targets))
        finally:
            self._publishing -= 1
        refused = [(m, a) for m, a in zip(targets, answers, strict=True) if isinstance(a, EngineError)]
        pauses = [answer for answer in answers if isinstance(answer, float)]
        if not pauses and refused and not all(isinstance(error, Unreachable) for _, error in refused):
            self._updates = before
            raise next(error for _, error in refused if not isinstance(error, Unreachable))
        for member, error in refused:
            self._set_aside(member, error)
        pause = max(pauses) if pauses else await self._wait_for_member()
        self.published[name or ""] = update.version
        return pause

    def close(self) -> None:
        for recovery in self._recoveries.values():
            recovery.cancel()
        self._recoveries.clear()

    def _set_aside(self, member: PoolMember, error: EngineError) -> None:
        if member.trouble is None:
            log.warning("%s is set aside: %s", member.name, error)
        member.trouble = error
        recovery = self._recoveries.get(member)
        if member.recovers_itself and (recovery is None or recovery.done()):
            self._recoveries[member] = asyncio.ensure_future(self._recover(member))

    async def _recover(self, member: PoolMember) -> None:
        attempt = 0
        while member.trouble is not None:
            await asyncio.sleep(self.backoff_delay(attempt))  # unbounded: until it is back, or the pool is closed
            attempt += 1
            try:
                await self._restore(member)
            except EngineError as error:
                member.trouble = error
                if attempt > QUIET_ATTEMPTS:
                    self._warnings.warn(member, "%s has not come back yet: %s", member.name, error)
        log.warning("%s serves", member.name)

    async def _restore(self, member: PoolMember) -> None:
        sent: dict[str | None, WeightUpdate] | None = None
        await _call_engine(member, CHECK_SECONDS, self._measure(member))
        while sent is not self._updates:  # they may change while we send
            sent = self._updates
            for update in sent.values():
                await _call_engine(member, PUBLISH_SECONDS, member.engine.load_weights(update))
        member.trouble = None

    async def _wait_for_member(self) -> float:
        waited, attempt = 0.0, 0
        while not self.serving:
            if lost := next((m.trouble for m in self.members if isinstance(m.trouble, UpdateLost)), None):
                raise lost
            if self.is_hopeless or waited > PUBLISH_SECONDS:
                raise self.trouble
            waited += (delay := self.backoff_delay(attempt))
            attempt += 1
            await asyncio.sleep(delay)  # bounded: by PUBLISH_SECONDS
        return 0.0

    async def _send(self, member: PoolMember, update: WeightUpdate) -> float | EngineError:
        try:
            try:
                pause = await _call_engine(member, PUBLISH_SECONDS, member.engine.load_weights(update))
            except PartialUpdateError:
                whole = dataclasses.replace(update, delta=None) if update.tensors else update
                pause = await _call_engine(member, PUBLISH_SECONDS, member.engine.load_weights(whole))
        except EngineError as error:
            return error
        if not member.recovers_itself:
            member.trouble = None
        return float(pause)

    async def _learn_size(self, member: PoolMember) -> None:
        try:
            await _call_engine(member, CHECK_SECONDS, self._measure(member))
        except EngineError as error:
            self._set_aside(member, error)

    async def _measure(self, member: PoolMember) -> None:
        limits, stats = await asyncio.gather(member.engine.limits(), member.engine.stats())
        member.context, member.capacity = limits.max_context, max(1, stats.capacity)


async def answer_within(seconds: float | None, work: Awaitable[T], late: Callable[[], EngineError]) -> T:
    """The result of `work`, or the error that `late` makes once the time is over."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise late() from None


async def _call_engine(member: PoolMember, seconds: float, work: Awaitable[T]) -> T:
    """The engine's answer, if in time. A remote engine whose answer cannot be read counts as unreachable."""
    try:
        return await answer_within(seconds, work, lambda: Unreachable(f"no answer within {seconds:g} s"))
    except OSError as error:  # a file that was to be sent is gone, say
        raise Unreachable(f"it cannot be reached ({error})") from error
    except MALFORMED_ANSWER as error:
        if not member.recovers_itself:
            raise
        raise Unreachable(f"it answered what cannot be read ({type(error).__name__}: {error})") from error
