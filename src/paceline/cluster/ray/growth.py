"""Machines that join while a run is under way get engines too."""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from paceline.cluster.ray.cluster import Room
from paceline.cluster.ray.engines import RayEngine
from paceline.inference import Pool

if TYPE_CHECKING:
    from paceline.cluster.ray.place import Parts

CLOSE_SECONDS = 5.0
log = logging.getLogger("paceline.ray")


class Growth:
    """Asks Ray for room for one engine more, again and again, and lets each join the pool. It serves as soon as it has
    the current weights.

    Ray gives the room once one machine has all of it: what is free on several together would hold no engine.
    """

    def __init__(self, parts: "Parts", pool: Pool, most: int) -> None:
        self._parts, self._pool, self._most = parts, pool, most
        self._more: list[tuple[Room, RayEngine]] = []

    async def __aenter__(self) -> "Growth":
        self._task = asyncio.create_task(self._grow(), name="room for more engines")
        return self

    async def __aexit__(self, *how: Any) -> None:
        self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
        for room, engine in self._more:
            engine.close()
            room.give_back()

    async def _grow(self) -> None:
        needs = self._parts.needs
        try:
            for number in range(needs.engines, self._most):
                room = await Room.when_free([needs.engine])  # unbounded: as long as the run lasts
                engine = self._parts.engine(number, room)
                self._more.append((room, engine))
                log.warning("there is room for %s: it joins", engine.name)
                self._pool.add(engine)
        except RayError as error:
            log.warning("the run grows no further: %s", error)
