"""Messages between a client process and the engine's process, and the engine's side: msgpack frames, never pickle.

A frame is eight bytes of length and a list of messages. Weights travel as safetensors bytes or as the paths of files
both sides can read.
"""

import asyncio
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from safetensors import SafetensorError

from paceline.engine.base import Completion, Engine, EngineLimits, EngineStats, GenerateRequest, Listener, Piece
from paceline.errors import (
    DeltaBaseMismatch,
    EngineError,
    Mismatch,
    Overloaded,
    PartialUpdateError,
    RequestError,
    UnknownModel,
)
from paceline.weights import tensors as libraries
from paceline.weights.update import Adapter, Array, Canary, ServedPolicy, WeightUpdate
from paceline.weights.weight_store import StoredTensors, read_delta

FRAME_HEADER = struct.Struct("<Q")
ERROR_TYPES = {
    kind.__name__: kind
    for kind in (EngineError, RequestError, UnknownModel, Overloaded, Mismatch, DeltaBaseMismatch, PartialUpdateError)
}
ControlCall = Literal["policy", "limits", "stats", "pause", "resume", "sleep", "wake"]


class RemoteEngine(ABC):
    """The calls of the `Engine` protocol that have no arguments and no result."""

    _busy = 0.0

    @abstractmethod
    async def _ask(self, what: ControlCall) -> Any: ...

    async def pause(self) -> None:
        await self._ask("pause")

    async def resume(self) -> None:
        await self._ask("resume")

    async def sleep(self) -> None:
        await self._ask("sleep")

    async def wake(self) -> None:
        await self._ask("wake")

    @property
    def busy_seconds(self) -> float:
        """As of the last answer that reported it."""
        return self._busy


class EngineMessage(msgspec.Struct, array_like=True, tag=True):
    """A message about the request of this number."""

    id: int


class Generate(EngineMessage):
    """Sample a completion; with `listen`, send its tokens while they come."""

    request: GenerateRequest
    listen: bool


class Cancel(EngineMessage):
    """The client no longer waits for this request."""


class ScoreFrame(EngineMessage):
    sequences: list[list[int]]
    temperature: float
    model: str


class Load(EngineMessage):
    """Take new weights: safetensors bytes, or paths of safetensors files."""

    version: int
    weights: bytes | list[str]
    adapter: Adapter | None
    expected: str | None
    canary: Canary | None
    delta: bytes = b""
    """In place of the weights."""


class Ask(EngineMessage):
    """Call a method that takes no arguments."""

    what: ControlCall


class EngineHello(EngineMessage):
    """The first message of the engine's process: ready, or why it never will be."""

    end_tokens: tuple[int, ...]
    error: str | None = None


class TokensFrame(EngineMessage):
    """New tokens of a request that runs on."""

    piece: Piece


class Answer(EngineMessage):
    """The result of a request, in the field of its kind."""

    completion: Completion | None = None
    scores: list[list[float]] | None = None
    policy: ServedPolicy | None = None
    limits: EngineLimits | None = None
    stats: EngineStats | None = None
    seconds: float = 0.0


class FailureFrame(EngineMessage):
    """Why there is no answer; the class is kept by name."""

    kind: str
    message: str

    @classmethod
    def from_error(cls, number: int, error: Exception) -> "FailureFrame":
        kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in ERROR_TYPES), "")
        return cls(number, kind or "EngineError", str(error) if kind else f"{type(error).__name__}: {error}")

    def error(self) -> EngineError:
        return ERROR_TYPES.get(self.kind, EngineError)(self.message)


class ToEngine(msgspec.Struct, array_like=True):
    """A batch of messages from the client."""

    messages: list[Generate | Cancel | ScoreFrame | Load | Ask]


class FromEngine(msgspec.Struct, array_like=True):
    """A batch of messages from the engine: everything that happened since its last frame."""

    messages: list[EngineHello | TokensFrame | Answer | FailureFrame]
    busy_seconds: float = 0.0


encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def encode_frame(batch: ToEngine | FromEngine) -> list[bytes]:
    body = encode(batch)
    return [FRAME_HEADER.pack(len(body)), body]


async def open_streams(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connected socket as streams, whether its other end is on this machine or elsewhere."""
    if sock.family == socket.AF_UNIX:
        return await asyncio.open_unix_connection(sock=sock)
    return await asyncio.open_connection(sock=sock)


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame's body, or None when the other side is gone."""
    try:
        head = await reader.readexactly(FRAME_HEADER.size)  # bounded: by the other side's life
        (length,) = FRAME_HEADER.unpack(head)
        return await reader.readexactly(length)  # bounded: by the other side's life
    except (asyncio.IncompleteReadError, OSError):  # a machine that vanished is no ConnectionError
        return None


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    top = None if pieces[0].top is None else [ranked for piece in pieces for ranked in piece.top or ()]
    return Piece(
        [token for piece in pieces for token in piece.token_ids],
        [logprob for piece in pieces for logprob in piece.logprobs],
        [version for piece in pieces for version in piece.versions],
        top,
    )


def as_piece(completion: Completion) -> Piece:
    return Piece(completion.token_ids, completion.logprobs, completion.versions, completion.top)


def deliver_whole(completion: Completion, listener: Listener | None) -> Completion:
    """Pass a finished completion to the listener as one piece, for engines that do not stream; returns it."""
    if listener is not None:
        listener(as_piece(completion))
    return completion


async def handle_message(
    engine: Engine, message: EngineMessage, listener: Listener | None = None
) -> Answer | FailureFrame:
    """The engine's answer to a message. An error is an answer too, and a bug keeps its name."""
    try:
        match message:
            case Generate():
                return Answer(message.id, completion=await engine.generate(message.request, listener))
            case ScoreFrame():
                scores = await engine.score(message.sequences, message.temperature, message.model)
                return Answer(message.id, scores=scores)
            case Load():
                return Answer(message.id, seconds=await engine.load_weights(await _read_update(message)))
            case _:
                assert isinstance(message, Ask)
                value = await getattr(engine, message.what)()
                return Answer(message.id, **({} if value is None else {message.what: value}))
    except Exception as error:
        return FailureFrame.from_error(message.id, error)


async def _read_update(message: Load) -> WeightUpdate:
    if isinstance(message.weights, bytes):
        tensors: Mapping[str, Array] = await asyncio.to_thread(unpack_tensors, message.weights)
    else:
        tensors = stored = StoredTensors([Path(file) for file in message.weights])
        await asyncio.to_thread(stored.load)
    delta = await asyncio.to_thread(read_delta, message.delta) if message.delta else None
    return WeightUpdate(message.version, tensors, message.adapter, message.expected, message.canary, delta)


def unpack_tensors(data: bytes) -> dict[str, Array]:
    try:
        return libraries.deserialize(data)
    except SafetensorError as error:
        raise RequestError(f"the weights are no safetensors file: {error}") from error


GATHER_SECONDS = 0.001
"""How long a message may wait for others: less than a decode step takes."""


class ThreadToLoopQueue:
    """Carries messages from any thread to one event loop, which takes them in batches, in the order they came.

    A step of the engine reaches hundreds of listeners. The first message wakes the loop, the others are only appended;
    a moment later the loop delivers them all. Without that moment it would fight the engine for Python's lock over
    every token. The flag is lowered before the queue is emptied, so a message that comes in between raises it again:
    none is ever left behind.
    """

    def __init__(self, deliver: Callable[[list[Any]], None]) -> None:
        self._deliver = deliver
        self._pending: deque[Any] = deque()
        self._flush_scheduled = False
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._pending)

    def send(self, message: Any) -> None:
        """From any thread."""
        self._pending.append(message)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon_threadsafe(self._loop.call_later, GATHER_SECONDS, self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        messages = []
        while self._pending:
            messages.append(self._pending.popleft())
        self._deliver(messages)


class EngineHost:
    """Serves any engine over one socket, until the other side closes it. What the engine's thread reports leaves in
    one write: a step that feeds hundreds of streams costs one wake-up and one system call."""

    def __init__(self, engine: Engine, end_tokens: Sequence[int]) -> None:
        self._engine = engine
        self._end_tokens = tuple(end_tokens)
        self._outbox: ThreadToLoopQueue | None = None
        self._running: dict[int, asyncio.Task[None]] = {}

    @property
    def has_pending(self) -> bool:
        """Whether any request is unanswered. From any thread."""
        return bool(self._running or self._outbox)

    @staticmethod
    def refuse(sock: socket.socket, cause: str) -> None:
        """Say in place of serving why there is no engine."""
        sock.sendall(b"".join(encode_frame(FromEngine([EngineHello(0, (), cause)]))))

    async def serve(self, sock: socket.socket) -> None:
        """Answer until the other side is gone; what it asked for last is then cancelled."""
        self._outbox = ThreadToLoopQueue(self._write)
        reader, self._writer = await open_streams(sock)
        self._outbox.send(EngineHello(0, self._end_tokens))
        try:
            while (body := await read_frame(reader)) is not None:
                for message in decode_to_engine(body).messages:
                    self._dispatch(message)
        finally:
            for task in self._running.values():
                task.cancel()
            self._writer.close()

    def _dispatch(self, message: EngineMessage) -> None:
        if isinstance(message, Cancel):
            if task := self._running.get(message.id):
                task.cancel()
            return
        task = self._running[message.id] = asyncio.ensure_future(self._answer(message))
        task.add_done_callback(lambda _: self._running.pop(message.id, None))

    async def _answer(self, message: EngineMessage) -> None:
        outbox = self._outbox
        assert outbox is not None
        listens = isinstance(message, Generate) and message.listen
        listener = (lambda piece: outbox.send((message.id, piece))) if listens else None
        outbox.send(await handle_message(self._engine, message, listener))

    def _write(self, batch: list[EngineMessage | tuple[int, Piece]]) -> None:
        messages: list[Any] = [message for message in batch if not isinstance(message, tuple)]
        pieces: dict[int, list[Piece]] = {}
        for number, piece in (item for item in batch if isinstance(item, tuple)):
            pieces.setdefault(number, []).append(piece)
        # Pieces come before whatever ended their request: the engine reports them first.
        messages[:0] = [TokensFrame(number, join_pieces(some)) for number, some in pieces.items()]
        if messages and not self._writer.is_closing():
            self._writer.writelines(encode_frame(FromEngine(messages, self._engine.busy_seconds)))
