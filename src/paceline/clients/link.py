"""Client of an engine in another process, over a socket."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import count
from socket import AF_UNIX, socket
from typing import Any

from paceline.clients import rpc
from paceline.engine.base import Completion, EngineLimits, EngineStats, GenerateRequest, Listener
from paceline.errors import EngineError, PacelineError
from paceline.util.private_folder import PrivateFolder
from paceline.weights.tensors import serialize, write_tensors
from paceline.weights.update import ServedPolicy, WeightUpdate
from paceline.weights.weight_store import StoredTensors

START_SECONDS = 1800.0
"""Time for the engine's process to load its weights and warm up."""
FILE_BYTES = 16 << 20
"""From this size on weights go to the process beside us as a file: through the socket all of them would be copied some
seven times, in pieces of 64 KiB."""


class FramedEngine(rpc.RemoteEngine):
    """Sends an engine the messages of `rpc.py`; subclasses provide the transport."""

    def __init__(self) -> None:
        self._numbers = count(1)

    @abstractmethod
    async def _send(self, message: rpc.EngineMessage) -> Any:
        """The answer to a message; failures are raised."""

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, model: str = ""
    ) -> list[list[float]]:
        token_ids = [list(map(int, ids)) for ids in sequences]
        return (await self._send(rpc.ScoreFrame(next(self._numbers), token_ids, temperature, model))).scores

    async def policy(self) -> ServedPolicy:
        return await self._ask("policy")

    async def limits(self) -> EngineLimits:
        return await self._ask("limits")

    async def stats(self) -> EngineStats:
        return await self._ask("stats")

    async def _ask(self, what: rpc.ControlCall) -> Any:
        return getattr(await self._send(rpc.Ask(next(self._numbers), what)), what, None)

    def _load_message(self, update: WeightUpdate, weights: bytes | list[str], delta: bytes = b"") -> rpc.Load:
        return rpc.Load(
            next(self._numbers), update.version, weights, update.adapter, update.expected, update.canary, delta
        )


class EngineLink(FramedEngine):
    """The asking side of a socket whose other end an `EngineHost` serves; speaks the `Engine` protocol.

    `start` waits for the other side's first word, without an event loop; the first call of an event loop then takes the
    socket over. Requests of one turn of the loop leave in one write.
    """

    def __init__(self, sock: socket, cause: Callable[[], str] = lambda: "the connection was closed") -> None:
        super().__init__()
        self._sock = sock
        self._cause = cause
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._listeners: dict[int, Listener] = {}
        self._outbox: list[Any] = []
        self._reader_task: asyncio.Task[EngineError] | None = None
        """Reads what the engine says, and ends with the cause when its process is gone."""
        self._writer: asyncio.StreamWriter | None = None
        self._folder: PrivateFolder | None = None
        """Holds weights on their way to the engine."""
        self.end_tokens: tuple[int, ...] = ()

    def start(self) -> None:
        """Wait until the engine is ready, or say why it never will be."""
        self._sock.settimeout(START_SECONDS)
        try:
            body = receive_frame(self._sock)
        except TimeoutError:
            raise EngineError(f"the engine's process was not ready within {START_SECONDS:.0f} s") from None
        self._sock.settimeout(None)
        if body is None:
            raise EngineError(f"the engine's process ended before it was ready: {self._cause()}")
        hello = rpc.decode_from_engine(body).messages[0]
        assert isinstance(hello, rpc.EngineHello)
        if hello.error is not None:
            raise PacelineError(hello.error)
        self.end_tokens = hello.end_tokens

    def close(self) -> None:
        if self._reader_task is not None:
            self._reader_task.cancel()
        self._sock.close()
        if self._folder is not None:
            self._folder.close()

    async def generate(self, request: GenerateRequest, listener: Listener | None = None) -> Completion:
        number = next(self._numbers)
        if listener is not None:
            self._listeners[number] = listener
        try:
            return (await self._send(rpc.Generate(number, request, listener is not None))).completion
        except asyncio.CancelledError:
            self._enqueue(rpc.Cancel(number))
            raise
        finally:
            self._listeners.pop(number, None)

    async def load_weights(self, update: WeightUpdate) -> float:
        tensors = update.tensors
        if isinstance(tensors, StoredTensors) and not tensors.deltas:
            return await self._send_update(update, [str(file) for file in tensors.files])
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._sock.family != AF_UNIX or size < FILE_BYTES:
            return await self._send_update(update, await asyncio.to_thread(serialize, tensors))
        self._folder = self._folder or PrivateFolder()
        file = self._folder.path / f"{next(self._numbers)}.safetensors"
        try:
            try:
                await asyncio.to_thread(write_tensors, tensors, file)
            except OSError:  # no room there: over the connection, then
                file.unlink(missing_ok=True)
                return await self._send_update(update, await asyncio.to_thread(serialize, tensors))
            return await self._send_update(update, [str(file)])
        finally:
            file.unlink(missing_ok=True)

    async def _send_update(self, update: WeightUpdate, weights: bytes | list[str]) -> float:
        delta = b"" if update.delta is None else update.delta.data
        return (await self._send(self._load_message(update, weights, delta))).seconds

    async def wait_closed(self) -> EngineError:
        """Wait until the engine's process is gone; returns the cause."""
        return await asyncio.shield(self._attach())  # unbounded: as long as the other side lives

    async def _send(self, message: rpc.EngineMessage) -> Any:
        if (reading := self._attach()).done():
            raise EngineError("the link was closed") if reading.cancelled() else reading.result()  # bounded: it is done
        answer = self._pending[message.id] = asyncio.get_running_loop().create_future()
        self._enqueue(message)
        try:
            return await answer  # bounded: by the pool's deadline, and by the life of the other side
        finally:
            self._pending.pop(message.id, None)

    def _attach(self) -> asyncio.Task[EngineError]:
        if self._reader_task is None:
            self._reader_task = asyncio.ensure_future(self._read_loop())
        return self._reader_task

    def _enqueue(self, message: Any) -> None:
        self._outbox.append(message)
        if len(self._outbox) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._writer is None or not self._outbox:
            return  # not connected yet: the reader flushes when it is
        messages, self._outbox = self._outbox, []
        if not self._writer.is_closing():
            self._writer.writelines(rpc.encode_frame(rpc.ToEngine(messages)))

    async def _read_loop(self) -> EngineError:
        reader, self._writer = await rpc.open_streams(self._sock)
        self._flush()
        while (body := await rpc.read_frame(reader)) is not None:
            self._dispatch(rpc.decode_from_engine(body))
        self._writer.close()
        message = f"the engine's process ended: {await asyncio.to_thread(self._cause)}"
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(EngineError(message))
        return EngineError(message)

    def _dispatch(self, batch: rpc.FromEngine) -> None:
        self._busy = batch.busy_seconds
        for message in batch.messages:
            if isinstance(message, rpc.TokensFrame):
                if listener := self._listeners.get(message.id):
                    listener(message.piece)
                continue
            answer = self._pending.get(message.id)
            if answer is None or answer.done():
                continue  # cancelled meanwhile
            if isinstance(message, rpc.FailureFrame):
                answer.set_exception(message.error())
            else:
                answer.set_result(message)


def receive_frame(sock: socket) -> bytes | None:
    """The next frame's body, without an event loop; None when the other side is gone."""
    head = _receive_exactly(sock, rpc.FRAME_HEADER.size)
    return _receive_exactly(sock, rpc.FRAME_HEADER.unpack(head)[0]) if head else None


def _receive_exactly(sock: socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))  # bounded: by the socket's own timeout
        if not part:
            return None
        data += part
    return bytes(data)
