"""Runs an engine as a Ray actor, with the orchestrator's handle on it, and weights in the object store."""

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import ObjectLostError, RayActorError, RayError
from torch import Tensor

from paceline.clients import rpc
from paceline.clients.link import FramedEngine
from paceline.config import RunConfig
from paceline.engine.base import Completion, GenerateRequest, Listener
from paceline.engine.engine import DecodingEngine
from paceline.errors import EngineError, RequestError, Unreachable, UpdateLost, first_line
from paceline.runtime.scorer import Scorer
from paceline.runtime.serving import Ends, embedded_engine, embedded_scorer, exit_after_failure, watch_engine
from paceline.trainer import TrainerLost
from paceline.weights import tensors as libraries
from paceline.weights.broadcast import Receiver
from paceline.weights.update import WeightUpdate

if TYPE_CHECKING:
    from paceline.runtime.ray.ranks import BroadcastRound, WeightsGroup

CONTROL = "control"
"""The group of calls that are answered however many requests there are; it has an event loop of its own."""


class RayActor:
    """A part of a run in a process of Ray's. What it prints goes into the run directory, which every machine of the
    cluster must see under the same path, as checkpoints do."""

    def __init__(self, config: str, name: str, live: str) -> None:
        self.config = RunConfig.model_validate_json(config)
        self.name = name
        if Path(live).is_dir():
            sys.stdout.flush()
            sys.stderr.flush()
            with (Path(live) / f"{name}.log").open("ab", buffering=0) as log:  # for libraries written in C too
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)

    @ray.method(concurrency_group=CONTROL)
    async def host_and_pid(self) -> tuple[str, int]:
        """This machine and process."""
        return socket.gethostname(), os.getpid()


def last_line(error: BaseException) -> str:
    """The cause, where the error's text is a remote traceback."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


KINDS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Types by the names a safetensors file has for them."""


def tensors_in(flat_buffer: Tensor) -> dict[str, Tensor]:
    """The tensors of a safetensors file that lies in memory as one flat buffer: views of it, nothing is copied."""
    try:
        start = 8 + int.from_bytes(bytes(flat_buffer[:8].tolist()), "little")
        header = json.loads(bytes(flat_buffer[8:start].numpy()))
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                low, high = entry["data_offsets"]
                raw = flat_buffer[start + low : start + high]
                kind = KINDS[entry["dtype"]]
                raw = raw if raw.data_ptr() % kind.itemsize == 0 else raw.clone()  # numbers begin at their own width
                found[name] = raw.view(kind).view(entry["shape"])
        return found
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise RequestError(f"these {len(flat_buffer)} bytes are no safetensors file: {error}") from error


FLAT_BUFFER = "flat_buffer"
"""The one tensor of a broadcast: the bytes of a safetensors file."""


def as_flat_buffer(weights: NDArray) -> Tensor:
    """The same memory, which belongs to the object store and is only read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that cannot be written to
        return torch.from_numpy(weights)


CALLS_PER_TURN = 8
"""Calls between two turns of the event loop. Handing one to Ray takes 0.1 to 0.5 ms, during which nothing else runs."""


class CallThrottle:
    """Lets so many callers through in each turn of the event loop, first come first served.

    New weights go to every engine at once, and a batch that ships makes room for hundreds of requests in one moment:
    256 calls in a row kept the event loop from all else for 140 ms.
    """

    def __init__(self, each_turn: int = CALLS_PER_TURN) -> None:
        self._each_turn = each_turn
        self._loop: asyncio.AbstractEventLoop | None = None

    async def turn(self) -> None:
        """Wait for one's turn, which for the first few of a crowd is now."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the last one may have ended with calls waiting
            self._loop, self._places = loop, asyncio.Semaphore(self._each_turn)
        await self._places.acquire()  # bounded: by those before, each of whom takes one turn
        loop.call_soon(self._places.release)


THROTTLE = CallThrottle()
"""Of all calls of this process."""


class WeightsLost(UpdateLost, TrainerLost):
    """The object store lost the newest weights, and with them what was trained since the newest checkpoint."""


class EngineActor(RayActor):
    """One embedded engine. Started again after a death it holds the weights it began with, and says so: the roster then
    gives it the current ones before it serves. One whose thread has failed ends itself, so that Ray starts it again.

    Control calls have places of their own beside those of requests: a full engine must still take new weights.
    """

    serves: ClassVar[Callable[[RunConfig], AbstractContextManager[tuple[DecodingEngine | Scorer, Ends]]]] = (
        embedded_engine
    )

    _receiver: Receiver | None = None

    def __init__(self, *arguments: str) -> None:
        super().__init__(*arguments)
        self._stack = contextlib.ExitStack()
        self._engine, _ = self._stack.enter_context(type(self).serves(self.config))
        watch_engine(self._engine, exit_after_failure)

    async def answer(self, question: bytes) -> bytes:
        (message,) = rpc.decode_to_engine(question).messages
        return self._framed(await rpc.handle_message(self._engine, message))

    @ray.method(concurrency_group=CONTROL)
    async def order(self, question: bytes) -> bytes:
        """A control call, which a full engine answers too."""
        return await self.answer(question)

    @ray.method(concurrency_group=CONTROL)
    async def load(self, head: bytes, weights: NDArray) -> bytes:
        """Weights that lie in the object store; Ray has brought them to this machine."""
        return await self._apply(head, as_flat_buffer(weights))

    @ray.method(concurrency_group=CONTROL)
    async def receive_weights(self, head: bytes, size: int) -> bytes:
        """Weights that the first rank broadcasts now."""
        if self._receiver is None:
            raise EngineError("this engine is in no group")
        layout = [{"name": FLAT_BUFFER, "dtype": "uint8", "shape": [size]}]
        tensors = await asyncio.to_thread(self._receiver.receive, layout)  # the next broadcast overwrites their memory
        return await self._apply(head, tensors[FLAT_BUFFER])

    async def _apply(self, head: bytes, flat_buffer: Tensor) -> bytes:
        (message,) = rpc.decode_to_engine(head).messages
        assert isinstance(message, rpc.Load)
        try:
            tensors = tensors_in(flat_buffer)
            update = WeightUpdate(message.version, tensors, message.adapter, message.expected, message.canary)
            answer: rpc.EngineMessage = rpc.Answer(message.id, seconds=await self._engine.load_weights(update))
        except Exception as error:
            answer = rpc.FailureFrame.from_error(message.id, error)
        return self._framed(answer)

    @ray.method(concurrency_group=CONTROL)
    async def join_group(self, invitation: dict[str, Any], device: str) -> None:
        """Join the first rank and the other engines for broadcasts, and leave the previous group."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        receiver = Receiver(**invitation, device=device)
        await asyncio.to_thread(receiver.form)
        self._receiver = receiver

    def _framed(self, answer: Any) -> bytes:
        return rpc.encode(rpc.FromEngine([answer], self._engine.busy_seconds))


class ScorerActor(EngineActor):
    """One scorer, which never samples. Started again after a death it is as good as before: its model is frozen."""

    serves = embedded_scorer


class SnapshotActor(EngineActor):
    """A scorer of snapshots of the policy. It scores once it was sent one."""

    serves = partial(embedded_scorer, follows=True)


class RayEngine(FramedEngine):
    """Speaks the `Engine` protocol to an actor. Ray restarts a dead actor; meanwhile requests fail as unreachable, and
    the pool sends them elsewhere."""

    def __init__(self, actor: Any, name: str, group: "WeightsGroup | None" = None) -> None:
        super().__init__()
        self.actor, self.name, self._group = actor, name, group

    async def generate(self, request: GenerateRequest, listener: Listener | None = None) -> Completion:
        done = await self._send(rpc.Generate(next(self._numbers), request, False))
        return rpc.deliver_whole(done.completion, listener)

    async def load_weights(self, update: WeightUpdate) -> float:
        tensors = (await self.store_update(update)).tensors
        assert isinstance(tensors, ObjectTensors)
        framed = rpc.encode(rpc.ToEngine([self._load_message(update, b"")]))
        if self._group is not None and update.adapter is None:
            data = await self._group.deliver(self, framed, tensors)
            if data is not None:
                return self._decode(data).seconds
        await THROTTLE.turn()
        return (await self._result(self.actor.load.remote(framed, tensors.reference))).seconds

    async def store_update(self, update: WeightUpdate) -> WeightUpdate:
        """The update with its tensors in the object store, from where any node can have them."""
        if isinstance(update.tensors, ObjectTensors):
            return update
        return dataclasses.replace(update, tensors=await asyncio.to_thread(ObjectTensors.put, update.tensors))

    def start(self) -> None:
        """Actors start by themselves."""

    async def aclose(self) -> None:
        """Actors belong to the placement, not to their callers."""

    def close(self) -> None:
        ray.kill(self.actor)

    async def _send(self, message: Any) -> Any:
        await THROTTLE.turn()
        method = self.actor.order if isinstance(message, rpc.Ask) else self.actor.answer
        return await self._result(method.remote(rpc.encode(rpc.ToEngine([message]))))

    async def _result(self, reference: Any) -> Any:
        try:
            data = await reference  # bounded: by the pool's deadline, and by the actor's life
        except asyncio.CancelledError:
            ray.cancel(reference)  # which takes the request out of the engine
            raise
        except ObjectLostError as error:
            raise WeightsLost(f"the weights were lost with the machine that held them: {first_line(error)}") from error
        except RayActorError as error:
            raise Unreachable(f"{self.name} does not answer: {first_line(error)}") from None
        except RayError as error:
            if isinstance(getattr(error, "cause", None), ObjectLostError):
                raise WeightsLost(f"{self.name} cannot fetch the weights: {first_line(error)}") from error
            raise Unreachable(f"{self.name}: {first_line(error)}") from error
        return self._decode(data)

    def _decode(self, data: bytes) -> Any:
        batch = rpc.decode_from_engine(data)
        self._busy = batch.busy_seconds
        (answer,) = batch.messages
        if isinstance(answer, rpc.FailureFrame):
            raise answer.error()
        return answer


class ObjectTensors(Mapping[str, Tensor]):
    """Tensors in Ray's object store, as the bytes of one safetensors file; read here only on access."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference
        self.round: BroadcastRound | None = None
        """The broadcast of these, where there was one."""

    @classmethod
    def put(cls, tensors: Mapping[str, Tensor]) -> "ObjectTensors":
        return cls(ray.put(pack_tensors(tensors)))

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return rpc.unpack_tensors(ray.get(self.reference, timeout=FETCH_SECONDS).tobytes())


FETCH_SECONDS = 900.0


def pack_tensors(tensors: Mapping[str, Tensor]) -> NDArray:
    """Safetensors bytes as an array, which Ray keeps and maps without copying."""
    return np.frombuffer(libraries.serialize(tensors), dtype=np.uint8)
