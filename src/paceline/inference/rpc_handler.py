"""Answers what other processes ask of an engine, one message at a time, whatever carries the messages."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError

from paceline.inference.base import Engine, Listener, RequestError
from paceline.inference.frames import (
    Answer,
    Ask,
    CompletionFrame,
    EngineMessage,
    FailureFrame,
    Generate,
    Load,
    ScoreFrame,
    Scores,
    as_ints,
    floats,
)
from paceline.inference.stored import StoredTensors, read_delta
from paceline.model import tensors as libraries
from paceline.model.weights import Array, WeightUpdate


class EngineRpcHandler:
    """One engine's answers. Whatever goes wrong is an answer too."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._answers: dict[type[EngineMessage], Callable[..., Awaitable[EngineMessage]]] = {
            ScoreFrame: self._score,
            Load: self._load,
            Ask: self._ask,
        }

    async def answer(self, message: EngineMessage, listener: Listener | None = None) -> EngineMessage:
        """A completion, scores, or what became of it; a bug keeps its name."""
        try:
            if isinstance(message, Generate):
                return CompletionFrame.of(message.id, await self.engine.generate(message.request, listener))
            return await self._answers[type(message)](message)
        except Exception as error:
            return FailureFrame.of(message.id, error)

    async def _score(self, message: ScoreFrame) -> EngineMessage:
        sequences = [as_ints(ids) for ids in message.sequences]
        scores = await self.engine.score(sequences, message.temperature, message.model)
        return Scores(message.id, [floats(score) for score in scores])

    async def _load(self, message: Load) -> EngineMessage:
        if isinstance(message.weights, bytes):
            tensors: Mapping[str, Array] = await asyncio.to_thread(unpacked, message.weights)
        else:
            tensors = stored = StoredTensors([Path(file) for file in message.weights])
            await asyncio.to_thread(stored.fill)
        delta = await asyncio.to_thread(read_delta, message.delta) if message.delta else None
        update = WeightUpdate(message.version, tensors, message.adapter, message.expected, message.canary, delta)
        return Answer(message.id, seconds=await self.engine.load_weights(update))

    async def _ask(self, message: Ask) -> EngineMessage:
        value = await getattr(self.engine, message.what)()
        return Answer(message.id, **({} if value is None else {message.what: value}))


def unpacked(data: bytes) -> dict[str, Array]:
    """Tensors of safetensors bytes."""
    try:
        return libraries.unpacked(data)
    except SafetensorError as error:
        raise RequestError(f"the weights are no safetensors file: {error}") from error
