"""A pool in which past versions of the policy speak too."""

import dataclasses
from collections.abc import Callable, Sequence

from paceline.inference.base import Completion, Engine, GenerateRequest
from paceline.inference.pool import Pool
from paceline.model.weights import Adapter, WeightUpdate


class PoolWithPast(Pool):
    """Keeps versions that were published once, each under a name that requests choose it by.

    Where the policy is an adapter, a past one is one more adapter of the same engines. Where it is a whole model, each
    name gets an engine of its own, made when it is first needed.
    """

    def __init__(self, engines: Sequence[Engine], engine: Callable[[], Engine]) -> None:
        super().__init__(engines)
        self._make = engine
        self._past: dict[str, tuple[Engine, Pool]] = {}

    async def keep(self, name: str, update: WeightUpdate) -> None:
        """From now on this version answers to `name`; whoever did before is gone."""
        if update.adapter is not None:
            # The canary speaks of the policy's own adapter; the fingerprint still proves the tensors.
            adapter = Adapter(name, update.adapter.scale)
            await self.load_weights(dataclasses.replace(update, adapter=adapter, canary=None))
            return
        if name not in self._past:
            engine = self._make()
            self._past[name] = engine, Pool([engine])
            engine.start()
        await self._past[name][1].load_weights(update)

    async def generate(self, request: GenerateRequest, deadline: float | None = None) -> Completion:
        if request.model not in self._past:
            return await super().generate(request, deadline)
        return await self._past[request.model][1].generate(dataclasses.replace(request, model=""), deadline)

    def close(self) -> None:
        super().close()
        for engine, pool in self._past.values():
            pool.close()
            engine.close()
        self._past.clear()
