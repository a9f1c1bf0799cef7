"""An engine as a Ray actor, and the orchestrator's handle on it."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec
import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayError
from safetensors.torch import save
from torch import Tensor

from paceline.cluster.ray.actors import Actor
from paceline.cluster.serving import embedded
from paceline.inference.base import Completion, EngineStats, GenerateRequest, Limits, Listener, Piece, Unreachable
from paceline.inference.desk import Desk, unpacked
from paceline.inference.frames import (
    Answer,
    Ask,
    Done,
    Failed,
    FromEngine,
    Generate,
    Load,
    Message,
    Question,
    Score,
    Scores,
    ToEngine,
    as_floats,
    decode_from_engine,
    decode_to_engine,
    ints,
)
from paceline.model.weights import Policy, WeightUpdate

_encode = msgspec.msgpack.Encoder().encode


class EngineActor(Actor):
    """One embedded engine. Started again after a death it holds the weights it began with, and says so: the roster then
    gives it the current ones before it serves."""

    def __init__(self, config: str, name: str, live: str) -> None:
        super().__init__(config, name, live)
        self._stack = contextlib.ExitStack()
        self._engine, self.ends = self._stack.enter_context(embedded(self.config))
        self._desk = Desk(self._engine)

    async def answer(self, question: bytes) -> bytes:
        (message,) = decode_to_engine(question).messages
        return self._framed(await self._desk.answer(message))

    async def load(self, head: bytes, weights: NDArray) -> bytes:
        """Weights that lie in the object store; Ray has brought them to this machine."""
        (message,) = decode_to_engine(head).messages
        assert isinstance(message, Load)
        tensors = await asyncio.to_thread(unpacked, weights.tobytes())
        update = WeightUpdate(message.version, tensors, message.adapter, message.expected, message.canary)
        try:
            answer: Message = Answer(message.id, seconds=await self._engine.load_weights(update))
        except Exception as error:
            answer = Failed.of(message.id, error)
        return self._framed(answer)

    async def end_tokens(self) -> tuple[int, ...]:
        return self.ends

    def _framed(self, answer: Any) -> bytes:
        return _encode(FromEngine([answer], self._engine.busy_seconds))


class RayEngine:
    """Speaks the `Engine` protocol to an actor. Ray starts a dead actor again; whoever asks meanwhile is told that
    nobody is there, and the pool asks elsewhere."""

    def __init__(self, actor: Any, name: str) -> None:
        self.actor, self.name = actor, name
        self._numbers = count(1)
        self._busy = 0.0

    async def generate(self, request: GenerateRequest, listener: Listener | None = None) -> Completion:
        """One completion. A listener hears it as one piece, when it is whole."""
        done: Done = await self._ask(Generate(next(self._numbers), request, False))
        completion = done.completion()
        if listener is not None:
            listener(Piece(completion.token_ids, completion.logprobs, completion.versions, completion.top))
        return completion

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, model: str = ""
    ) -> list[list[float]]:
        question = Score(next(self._numbers), [ints(ids) for ids in sequences], temperature, model)
        scores: Scores = await self._ask(question)
        return [as_floats(score) for score in scores.logprobs]

    async def load_weights(self, update: WeightUpdate) -> float:
        tensors = (await self.keep(update)).tensors
        assert isinstance(tensors, ObjectTensors)
        head = Load(next(self._numbers), update.version, b"", update.adapter, update.expected, update.canary)
        answer: Answer = await self._heard(self.actor.load.remote(_encode(ToEngine([head])), tensors.reference))
        return answer.seconds

    async def keep(self, update: WeightUpdate) -> WeightUpdate:
        """The update with its tensors in the object store, from where any node can have them."""
        if isinstance(update.tensors, ObjectTensors):
            return update
        return dataclasses.replace(update, tensors=await asyncio.to_thread(ObjectTensors.put, update.tensors))

    async def policy(self) -> Policy:
        return _given((await self._question("policy")).policy)

    async def limits(self) -> Limits:
        return _given((await self._question("limits")).limits)

    async def stats(self) -> EngineStats:
        return _given((await self._question("stats")).stats)

    async def pause(self) -> None:
        await self._question("pause")

    async def resume(self) -> None:
        await self._question("resume")

    async def sleep(self) -> None:
        await self._question("sleep")

    async def wake(self) -> None:
        await self._question("wake")

    @property
    def busy_seconds(self) -> float:
        """As of its last answer."""
        return self._busy

    def start(self) -> None:
        """Actors start by themselves."""

    def close(self) -> None:
        ray.kill(self.actor)

    async def _question(self, what: Question) -> Answer:
        return await self._ask(Ask(next(self._numbers), what))

    async def _ask(self, message: Any) -> Any:
        return await self._heard(self.actor.answer.remote(_encode(ToEngine([message]))))

    async def _heard(self, reference: Any) -> Any:
        try:
            batch = decode_from_engine(await reference)  # bounded: by the pool's deadline, and by the actor's life
        except asyncio.CancelledError:
            ray.cancel(reference)  # which takes the request out of the engine
            raise
        except RayActorError as error:
            raise Unreachable(f"{self.name} does not answer: {_brief(error)}") from None
        except RayError as error:
            raise Unreachable(f"{self.name}: {_brief(error)}") from error
        self._busy = batch.busy_seconds
        (answer,) = batch.messages
        if isinstance(answer, Failed):
            raise answer.error()
        return answer


class ObjectTensors(Mapping[str, Tensor]):
    """Tensors in Ray's object store, as the bytes of one safetensors file; read here only if somebody looks."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference
        self._tensors: dict[str, Tensor] | None = None

    @classmethod
    def put(cls, tensors: Mapping[str, Tensor]) -> "ObjectTensors":
        return cls(ray.put(packed(tensors)))

    def __getitem__(self, name: str) -> Tensor:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def _read(self) -> dict[str, Tensor]:
        if self._tensors is None:
            self._tensors = unpacked(ray.get(self.reference, timeout=FETCH_SECONDS).tobytes())
        return self._tensors


FETCH_SECONDS = 900.0


def packed(tensors: Mapping[str, Tensor]) -> NDArray:
    """Safetensors bytes as an array, which Ray keeps and maps without copying."""
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return np.frombuffer(data, dtype=np.uint8)


def _brief(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _given(value: Any) -> Any:
    assert value is not None
    return value
