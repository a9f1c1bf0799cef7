"""Presents one adapter of an engine as its policy, so that several policies share one engine."""

import dataclasses
from collections.abc import Sequence

from paceline.inference.base import (
    Completion,
    Engine,
    EngineError,
    EngineLimits,
    EngineStats,
    GenerateRequest,
    Listener,
)
from paceline.model.weights import ServedPolicy, WeightUpdate


class AdapterView:
    """Sends requests and updates of the policy to the adapter of this name. The code that made the engine starts and
    ends it."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name
        self._mark = ""

    async def generate(self, request: GenerateRequest, listener: Listener | None = None) -> Completion:
        asked = dataclasses.replace(request, model=request.model or self._name)
        return await self._engine.generate(asked, listener)

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, model: str = ""
    ) -> list[list[float]]:
        return await self._engine.score(sequences, temperature, model or self._name)

    async def load_weights(self, update: WeightUpdate) -> float:
        if update.adapter is None:
            raise EngineError("policies that share an engine are adapters, and this update is of a whole model")
        named = dataclasses.replace(update.adapter, name=update.adapter.name or self._name)
        pause = await self._engine.load_weights(dataclasses.replace(update, adapter=named))
        if named.name == self._name:
            self._mark = update.expected or update.fingerprint()
        return pause

    async def policy(self) -> ServedPolicy:
        held = (await self._engine.limits()).adapters
        return ServedPolicy(held.get(self._name, 0), self._mark)

    async def limits(self) -> EngineLimits:
        return await self._engine.limits()

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()

    @property
    def busy_seconds(self) -> float:
        return self._engine.busy_seconds

    def start(self) -> None:
        """It runs already."""

    def close(self) -> None:
        """The others go on."""
