"""Runs reward and tool code on other machines, each call still in a process that can be killed."""

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from paceline.cluster.ray.actors import RayActor
from paceline.envs.workers import ATTEMPTS, LOAD_SECONDS, Failure, WorkerFailed, WorkerLimits, Workers

AGAIN_SECONDS = 0.5


class WorkerActor(RayActor):
    """Runs calls in processes of its machine."""

    def __init__(self, config: str, name: str, live: str) -> None:
        super().__init__(config, name, live)
        self._workers: dict[WorkerLimits, Workers] = {}

    async def call(
        self, function: str, args: Sequence[Any], timeout: float, limits: tuple[int, int | None, int]
    ) -> dict[str, Any]:
        """The function's value, or how it failed."""
        workers = self._workers.setdefault(WorkerLimits(*limits), Workers(*limits))
        try:
            return {"value": await workers.call(function, args, timeout)}
        except WorkerFailed as failed:
            return {"kind": failed.kind, "reason": str(failed)}


class RayWorkers:
    """Sends each call to the least busy actor. One whose machine dies under it is made once more, elsewhere."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._busy = dict.fromkeys(range(len(actors)), 0)
        self._actors = list(actors)

    async def call(self, function: str, args: Sequence[Any], timeout: float, limits: WorkerLimits) -> Any:
        lost: list[int] = []
        waited = 0.0
        while len(lost) < ATTEMPTS:
            chosen = min(self._busy, key=lambda at: (at in lost, self._busy[at]))
            self._busy[chosen] += 1
            reference = self._actors[chosen].call.remote(
                function, list(args), timeout, (limits.count, limits.memory_mb, limits.answer_bytes)
            )
            try:
                answer = await reference  # bounded: the actor ends the call at its timeout
            except asyncio.CancelledError:
                ray.cancel(reference)  # its process is killed, as it would be here
                raise
            except RayTaskError:
                raise  # a bug over there: no worker was lost
            except ActorUnavailableError:
                # It is being started again, which is no verdict on the call.
                if waited > LOAD_SECONDS:
                    lost.append(chosen)
                waited += AGAIN_SECONDS
                await asyncio.sleep(AGAIN_SECONDS)  # bounded: by LOAD_SECONDS
                continue
            except RayError:
                lost.append(chosen)
                continue
            finally:
                self._busy[chosen] -= 1
            if "value" in answer:
                return answer["value"]
            kind: Failure = answer["kind"]
            raise WorkerFailed(kind, answer["reason"])
        raise WorkerFailed("exited", f"{len(lost)} workers were lost under it")

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
