"""Samples from several engines as if they were one, past versions of the policy among them."""

import asyncio
import dataclasses
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.clients.registry import (
    MALFORMED_ANSWER,
    EngineRegistry,
    PoolMember,
    PrefixAffinity,
    answer_within,
    choose_member,
)
from paceline.engine.base import Completion, Engine, EngineStats, GenerateRequest
from paceline.errors import EngineError, Overloaded, RequestError, UnknownModel, Unreachable
from paceline.util.rate_limited_logger import RateLimitedLogger
from paceline.weights.update import Adapter, ServedPolicy, WeightUpdate

MAX_WAIT_SECONDS = 300.0
"""How long a request without a deadline waits for room or for an engine, all in all."""
MOST_FAILED_ENGINES = 2
"""Engines that may fail under a request before the request is blamed."""
MOST_LOST_CONNECTIONS = 4
"""Connections to a healthy engine that may break under a request."""
SCORED_TOKENS = 512
"""Tokens to score that weigh as much as one request to sample, so that scores go where the fewest tokens wait."""
WARN_SECONDS = 20.0
"""A request that has waited this long is logged."""
T = TypeVar("T")
warnings = RateLimitedLogger(logging.getLogger("paceline.pool"))


class NoEngineLeft(EngineError):
    """Every engine is gone, and none of them can come back."""


@dataclass(slots=True)
class PendingRequest:
    """A request under way: its needs, and the failures and waits so far."""

    length: int
    """Tokens an engine's context must hold."""
    model: str
    deadline: float | None
    request: GenerateRequest | None = None
    """None where sequences are scored."""
    weight: float = 1.0
    """How much of an engine's capacity it takes."""
    sequences: int = 0
    """How many are scored."""
    full_members: tuple[PoolMember, ...] = ()
    """Engines that had no room in this round."""
    failed_members: tuple[PoolMember, ...] = ()
    lost_connections: int = 0
    rounds: int = 0
    waited_seconds: float = 0.0
    trouble: EngineError | None = None

    @property
    def description(self) -> str:
        if (request := self.request) is None:
            return f"the scoring of {self.sequences} sequences"
        return f"the request of {len(request.prompt_ids)} prompt tokens, order {request.order}, noise {request.noise}"


class Pool:
    """Routes each request to an engine with room and sees it through.

    Sampling noise is a pure function of the request's key, so a request whose engine stopped, or whose connection broke
    before the answer, is asked again elsewhere. What an engine refuses or fails for its own reasons is not.
    """

    def __init__(self, engines: Sequence[Engine], jitter: Callable[[], float] = random.random) -> None:
        self._registry = EngineRegistry(engines, jitter)
        self._affinity = PrefixAffinity()
        self._unanswered = 0

    def generate(self, request: GenerateRequest, deadline: float | None = None) -> Coroutine[Any, Any, Completion]:
        """One completion, within `deadline` seconds."""
        prompt = request.prompt_ids

        def route(candidates: list[PoolMember]) -> PoolMember:
            if len(candidates) == 1:
                return candidates[0]
            member = choose_member(candidates, self._affinity.find(prompt))
            self._affinity.record(prompt, member)
            return member

        async def ask(member: PoolMember) -> Completion:
            oldest = self._registry.published.get(request.model, 0)
            completion = await member.engine.generate(request)
            tokens, logprobs, versions = map(len, (completion.token_ids, completion.logprobs, completion.versions))
            if not tokens == logprobs == versions:
                found = f"{tokens} tokens with {logprobs} log probabilities and {versions} versions"
                raise EngineError(f"{member.name} answered {found}")
            # An engine may have been restarted unnoticed, with the weights it began with.
            if min(completion.versions, default=oldest) < oldest and await self._registry.set_aside_if_failing(member):
                raise Unreachable(f"{member.name} answered with version {min(completion.versions)}, not {oldest}")
            return completion

        return self._run(PendingRequest(len(prompt) + 1, request.model, deadline, request), route, ask)

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float = 1.0,
        model: str = "",
        deadline: float | None = None,
    ) -> list[list[float]]:
        """Log probability of every token given those before it; 0.0 for the first."""
        longest, weight = max(map(len, sequences), default=0), sum(map(len, sequences)) / SCORED_TOKENS
        return await self._run(
            PendingRequest(longest, model, deadline, weight=weight, sequences=len(sequences)),
            choose_member,
            lambda member: member.engine.score(sequences, temperature, model),
        )

    async def load_weights(self, update: WeightUpdate) -> float:
        """Give every engine the new weights; answers with the longest pause."""
        self._affinity.clear()
        return await self._registry.publish(update)

    def add(self, engine: Engine) -> None:
        """A further engine takes part as soon as it holds the current weights."""
        self._registry.add(engine)

    @property
    def published_version(self) -> int:
        """The policy's version that every engine in service has applied; 0 before the first update."""
        return self._registry.published.get("", 0)

    async def policies(self) -> list[ServedPolicy]:
        """The policy that each engine in service really serves."""
        return list(await asyncio.gather(*(member.engine.policy() for member in self._registry.serving)))

    async def stats(self) -> list[EngineStats]:
        """Vital signs of each engine in service."""
        return list(await asyncio.gather(*(member.engine.stats() for member in self._registry.serving)))

    def close(self) -> None:
        """Stop looking after engines that are set aside; the engines belong to the code that made them."""
        self._registry.close()

    @property
    def trouble(self) -> EngineError | None:
        return None if self._registry.serving else self._registry.trouble

    @property
    def running(self) -> int:
        return self._unanswered

    @property
    def busy(self) -> dict[str, float]:
        """Seconds that each engine has spent computing; may be asked from any thread."""
        return {member.name: member.engine.busy_seconds for member in list(self._registry.members)}

    @property
    def busy_seconds(self) -> float:
        """Mean time the engines have spent computing."""
        members = self._registry.members
        return sum(member.engine.busy_seconds for member in members) / len(members)

    def _run(
        self,
        pending: PendingRequest,
        route: Callable[[list[PoolMember]], PoolMember],
        ask: Callable[[PoolMember], Awaitable[T]],
    ) -> Coroutine[Any, Any, T]:
        def late() -> EngineError:
            cause = f" ({pending.trouble})" if pending.trouble else ""
            return EngineError(f"no completion within {pending.deadline:g} s{cause}: give it a longer deadline")

        work = self._attempt(pending, route, ask)
        return work if pending.deadline is None else answer_within(pending.deadline, work, late)

    async def _attempt(
        self,
        pending: PendingRequest,
        route: Callable[[list[PoolMember]], PoolMember],
        ask: Callable[[PoolMember], Awaitable[T]],
    ) -> T:
        self._unanswered += 1
        try:
            while True:
                member = route(await self._candidates(pending))
                member.unanswered += pending.weight
                try:
                    try:
                        return await ask(member)
                    finally:
                        member.unanswered -= pending.weight
                except UnknownModel as error:
                    if not self._registry.set_aside_if_restarted(member, pending.model, error):
                        raise
                except RequestError:
                    raise
                except Overloaded as error:
                    pending.full_members += (member,)
                    pending.trouble = error
                except EngineError as error:
                    await self._retry_or_raise(pending, member, error)
                except MALFORMED_ANSWER as error:
                    if not member.recovers_itself:
                        raise  # nothing came over a wire: it is a bug, and its traceback says where
                    what = f"what cannot be read ({type(error).__name__}: {error})"
                    garbled = EngineError(f"{member.name} answered {what}")
                    garbled.__cause__ = error
                    await self._retry_or_raise(pending, member, garbled)
        finally:
            self._unanswered -= 1

    async def _candidates(self, pending: PendingRequest) -> list[PoolMember]:
        """Engines in service that are large enough and have not just refused; waits until there is one."""
        members = self._registry.members
        if len(members) == 1 and members[0].trouble is members[0].context is None and not pending.full_members:
            return members  # most runs have one engine: nothing to choose, nothing to compare
        await self._registry.learn_sizes()
        if all(member.context is not None and member.context < pending.length for member in members):
            longest = max(member.context or 0 for member in members)
            raise RequestError(
                f"{pending.description} needs {pending.length} tokens, but no context holds more than {longest}"
            )
        while True:
            fit = [m for m in self._registry.serving if m.context is None or m.context >= pending.length]
            if free := [member for member in fit if member not in pending.full_members]:
                return free
            if self._registry.is_hopeless:
                trouble = pending.trouble or self._registry.trouble
                raise NoEngineLeft(str(trouble)) from trouble
            await self._wait(pending)
            pending.full_members = ()

    async def _wait(self, pending: PendingRequest) -> None:
        delay = self._registry.backoff_delay(pending.rounds)
        if pending.deadline is None and pending.waited_seconds + delay > MAX_WAIT_SECONDS:
            raise pending.trouble or self._registry.trouble
        pending.rounds += 1
        pending.waited_seconds += delay
        if pending.waited_seconds > WARN_SECONDS:  # all wait for the same cause, so one warning is enough
            text = "%d requests are not answered, one of them for %.0f s because there is no room: %s"
            if self.trouble is not None:
                text = "%d requests wait for an engine to come back, one of them for %.0f s: %s"
            warnings.warn(self, text, self._unanswered, pending.waited_seconds, self.trouble or pending.trouble)
        await asyncio.sleep(delay)

    async def _retry_or_raise(self, pending: PendingRequest, member: PoolMember, error: EngineError) -> None:
        """Raise the failure unless asking again is safe and may help."""
        pending.trouble = error
        try:
            fails = await self._registry.set_aside_if_failing(member)
        except MALFORMED_ANSWER:
            raise error from None  # it cannot even say what it serves
        if fails:
            pending.failed_members += (member,)
        elif isinstance(error, Unreachable):
            pending.lost_connections += 1
        else:
            raise error  # the engine lives: this is its answer
        if len(pending.failed_members) >= MOST_FAILED_ENGINES:
            names = " and ".join(member.name for member in pending.failed_members)
            raise EngineError(f"{pending.description} is given up after {names} failed under it: {error}") from error
        if pending.lost_connections >= MOST_LOST_CONNECTIONS:
            raise error


class LeaguePool(Pool):
    """Keeps versions that were published once, each under a name that requests choose it by.

    Where the policy is an adapter, a past one is one more adapter of the same engines. Where it is a whole model, each
    name gets an engine of its own, made when it is first needed.
    """

    def __init__(self, engines: Sequence[Engine], engine: Callable[[], Engine]) -> None:
        super().__init__(engines)
        self._make_engine = engine
        self._past_pools: dict[str, tuple[Engine, Pool]] = {}

    async def keep(self, name: str, update: WeightUpdate) -> None:
        """Serve this version as `name` from now on, in place of the one before."""
        if update.adapter is not None:
            # The canary speaks of the policy's own adapter; the fingerprint still proves the tensors.
            adapter = Adapter(name, update.adapter.scale)
            await self.load_weights(dataclasses.replace(update, adapter=adapter, canary=None))
            return
        if name not in self._past_pools:
            engine = self._make_engine()
            self._past_pools[name] = engine, Pool([engine])
            engine.start()
        await self._past_pools[name][1].load_weights(update)

    def generate(self, request: GenerateRequest, deadline: float | None = None) -> Coroutine[Any, Any, Completion]:
        if request.model not in self._past_pools:
            return super().generate(request, deadline)
        return self._past_pools[request.model][1].generate(dataclasses.replace(request, model=""), deadline)

    def close(self) -> None:
        super().close()
        for engine, pool in self._past_pools.values():
            pool.close()
            engine.close()
        self._past_pools.clear()
