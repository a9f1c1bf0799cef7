"""The client side of several engines: the one door through which everybody samples."""

import asyncio
from collections.abc import Sequence

from paceline.inference.base import Completion, Engine, EngineError, GenerateRequest
from paceline.model.weights import Policy, WeightUpdate


class Pool:
    """Routes each request to the engine with the fewest unanswered ones."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = list(engines)
        self._load = [0] * len(self._engines)

    async def generate(self, request: GenerateRequest, deadline: float | None = None) -> Completion:
        """One completion, within `deadline` seconds."""
        chosen = min(range(len(self._engines)), key=self._load.__getitem__)
        self._load[chosen] += 1
        try:
            return await asyncio.wait_for(self._engines[chosen].generate(request), deadline)
        except TimeoutError:
            raise EngineError(f"no completion within {deadline} s: raise the environment's timeout") from None
        finally:
            self._load[chosen] -= 1

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        chosen = min(range(len(self._engines)), key=self._load.__getitem__)
        return await self._engines[chosen].score(sequences, temperature)

    async def load_weights(self, update: WeightUpdate) -> float:
        """Give every engine the new weights; answers with the longest pause."""
        return max(await asyncio.gather(*(engine.load_weights(update) for engine in self._engines)))

    async def policies(self) -> list[Policy]:
        return list(await asyncio.gather(*(engine.policy() for engine in self._engines)))

    @property
    def running(self) -> int:
        """Requests not yet answered."""
        return sum(self._load)

    @property
    def busy_seconds(self) -> float:
        """Mean time the engines have spent computing."""
        return sum(engine.busy_seconds for engine in self._engines) / len(self._engines)
