"""Broadcasts full weights from the trainer's first rank to all engines at once, by a collective.

    every engine is asked to load -> the first rank and those engines meet, unless they have met before
                                  -> bucket by bucket to all of them at the same time -> each applies what it staged

The update lies in the object store of the first rank's machine as well: an engine that is left out, because it was
dead, hung or not yet there, fetches it from there. A group that breaks meets once more, without those that are gone.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError, RayError

from paceline.runtime.ray.cluster import last_line
from paceline.trainer import TrainerLost

if TYPE_CHECKING:
    from paceline.runtime.ray.engines import ObjectTensors, RayEngine

SECONDS = 60.0
"""For a group to meet, and for one bucket to arrive: how long a member that hangs can hold up the others."""
ECHO_SECONDS = 5.0
"""How much longer than a bucket the others are waited for once one has failed."""
LONGEST_SECONDS = 900.0
"""For a whole broadcast, and for all to apply it."""
MOST_FAILURES = 3
"""Broadcasts in a row that came to nothing, after which this run tries no more."""
log = logging.getLogger("paceline.ray")


@dataclass(eq=False, slots=True)
class Round:
    """One update on its way to those who asked for it before it left."""

    wanted: "dict[RayEngine, asyncio.Future[bytes | None]]" = field(default_factory=dict)
    """Each engine's answer, as soon as it came; None where the update did not reach it."""
    begun: bool = False
    task: "asyncio.Task[None] | None" = None


class WeightsGroup:
    """The first rank and the engines, as the orchestrator leads them."""

    def __init__(self, first_rank: Callable[[], Any], device: str = "cpu", seconds: float = SECONDS) -> None:
        self._first_rank, self._device, self._seconds = first_rank, device, seconds
        self._met: tuple[Any, list[RayEngine]] | None = None
        self._turn = asyncio.Lock()
        self._failures = 0
        self.broadcasts = 0
        """Those that reached an engine."""

    async def deliver(self, engine: "RayEngine", head: bytes, tensors: "ObjectTensors") -> bytes | None:
        """The engine's answer to weights that were broadcast to it; None if they must reach it otherwise."""
        if self._failures >= MOST_FAILURES:
            return None
        if tensors.round is None:
            this = tensors.round = Round()
            this.task = asyncio.ensure_future(self._broadcast(this, head, tensors.reference))
        if tensors.round.begun:
            self._met = None  # it comes late, or a second time: a restarted engine is in no group
            return None
        mine = tensors.round.wanted[engine] = asyncio.get_running_loop().create_future()
        return await mine  # bounded: each step of a broadcast is

    async def _broadcast(self, this: Round, head: bytes, reference: Any) -> None:
        try:
            async with self._turn:  # bounded: by the broadcast before
                this.begun = True  # all engines that were asked in the same moment have said so
                left = list(this.wanted)
                for _ in range(2):
                    if left:
                        left = await self._try(left, this, head, reference)
                reached = any(answer.done() for answer in this.wanted.values())
                self._failures = 0 if reached else self._failures + 1
                self.broadcasts += reached
        finally:
            for answer in this.wanted.values():
                if not answer.done():
                    answer.set_result(None)

    async def _try(self, members: "list[RayEngine]", this: Round, head: bytes, reference: Any) -> "list[RayEngine]":
        """Reach all of them; answers with those for whom it is worth another try."""

        async def row(engine: "RayEngine", size: int) -> bytes:
            answer = await engine.actor.receive_row.remote(head, size)
            if not this.wanted[engine].done():
                this.wanted[engine].set_result(answer)
            return answer

        try:
            rank = self._first_rank()
            outcomes = await self._meet(rank, members)
            if not _failed(outcomes):
                size = await self._soon(rank.hold.remote(reference))
                calls = {engine: row(engine, size) for engine in members}
                outcomes = await self._all({rank: rank.send_row.remote(), **calls})
        except (RayError, TrainerLost, TimeoutError) as error:  # the next call that needs the rank reports it
            log.warning("the first rank takes no part in a broadcast: %s", last_line(error))
            self._met = None
            return []
        left = [engine for engine in members if not this.wanted[engine].done()]
        if left:
            failed = _failed(outcomes)
            log.warning(
                "a broadcast of weights broke off: %s", "; ".join(map(last_line, failed.values())) or "no answer"
            )
            self._met = None
            left = [e for e in left if e in outcomes and not isinstance(failed.get(e), RayActorError)]
        return left

    async def _meet(self, rank: Any, members: "list[RayEngine]") -> dict[Any, Any]:
        if self._met == (rank, members):
            return {}
        invitations = await self._soon(rank.open_group.remote(len(members), self._device, self._seconds))
        calls = {
            engine: engine.actor.join_group.remote(invitation, self._device)
            for engine, invitation in zip(members, invitations, strict=True)
        }
        outcomes = await self._all({rank: rank.meet_group.remote(), **calls})
        if not _failed(outcomes):
            self._met = (rank, members)
        return outcomes

    async def _soon(self, reference: Any) -> Any:
        async with asyncio.timeout(self._seconds):
            return await reference

    async def _all(self, calls: Mapping[Any, Awaitable[Any]]) -> dict[Any, Any]:
        """Each call's answer or error. After the first failure the others have as long as a bucket may take to fail
        too, and a call that is still open then is missing from the answer."""
        tasks = {asyncio.ensure_future(call): who for who, call in calls.items()}
        try:
            _, silent = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION, timeout=LONGEST_SECONDS)
            if silent:
                await asyncio.wait(silent, timeout=self._seconds + ECHO_SECONDS)
            done = {who: task for task, who in tasks.items() if task.done()}
            return {who: task.exception() or task.result() for who, task in done.items()}  # bounded: all are done
        finally:
            for task in tasks:
                task.cancel()


def _failed(outcomes: Mapping[Any, Any]) -> dict[Any, BaseException]:
    return {who: got for who, got in outcomes.items() if isinstance(got, BaseException)}
