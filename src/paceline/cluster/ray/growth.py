"""Machines that join while a run is under way get engines too."""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import ray

from paceline.cluster.ray.cluster import actor
from paceline.cluster.ray.engines import EngineActor, RayEngine
from paceline.inference import Pool

if TYPE_CHECKING:
    from paceline.cluster.ray.place import Parts

LOOK_SECONDS = 5.0
log = logging.getLogger("paceline.ray")


class Growth:
    """Looks now and then whether there is room for one engine more, and lets it join the pool. It serves as soon as it
    has the current weights."""

    def __init__(self, parts: "Parts", pool: Pool, most: int) -> None:
        self._parts, self._pool, self._most = parts, pool, most
        self._more: list[RayEngine] = []

    async def __aenter__(self) -> "Growth":
        self._task = asyncio.create_task(self._grow(), name="room for more engines")
        return self

    async def __aexit__(self, *how: Any) -> None:
        self._task.cancel()
        await asyncio.wait([self._task], timeout=LOOK_SECONDS)
        for engine in self._more:
            engine.close()

    async def _grow(self) -> None:
        needs = self._parts.needs
        while needs.engines + len(self._more) < self._most:
            await asyncio.sleep(LOOK_SECONDS)  # unbounded: as long as the run lasts
            free = await asyncio.to_thread(ray.available_resources)
            if all(free.get(name, 0.0) >= amount for name, amount in needs.engine.items()):
                self._add(needs.engines + len(self._more))

    def _add(self, number: int) -> None:
        name = f"engine-{number}"
        arguments = self._parts.arguments(name)
        started = actor(
            EngineActor, self._parts.full_name(name), arguments, self._parts.needs.engine, again=True, at_once=4096
        )
        self._more.append(RayEngine(started, name))
        log.warning("there is room for %s: it joins", name)
        self._pool.add(self._more[-1])
