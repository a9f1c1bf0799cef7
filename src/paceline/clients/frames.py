"""Encodes messages between a client process and the engine's process: msgpack frames, never pickle.

A frame is eight bytes of length and a list of messages. Weights travel as safetensors bytes or as the paths of files
both sides can read.
"""

import asyncio
import socket
import struct
from collections.abc import Sequence

import msgspec

from paceline.clients.remote import Question
from paceline.engine.base import Completion, EngineLimits, EngineStats, GenerateRequest, Piece
from paceline.errors import EngineError, Mismatch, OtherBase, Overloaded, PartialUpdateError, RequestError, UnknownModel
from paceline.weights.update import Adapter, Canary, ServedPolicy

HEAD = struct.Struct("<Q")
ERRORS = {
    kind.__name__: kind
    for kind in (EngineError, RequestError, UnknownModel, Overloaded, Mismatch, OtherBase, PartialUpdateError)
}


class EngineMessage(msgspec.Struct, array_like=True, tag=True):
    """Whatever is said, about the request of this number."""

    id: int


class Generate(EngineMessage):
    """Sample a completion; with `listen`, send its tokens while they come."""

    request: GenerateRequest
    listen: bool


class Cancel(EngineMessage):
    """The client no longer waits for this request."""


class ScoreFrame(EngineMessage):
    """Score sequences."""

    sequences: list[list[int]]
    temperature: float
    model: str


class Load(EngineMessage):
    """Take new weights."""

    version: int
    weights: bytes | list[str]
    """Safetensors bytes, or paths of safetensors files."""
    adapter: Adapter | None
    expected: str | None
    canary: Canary | None
    delta: bytes = b""
    """In place of the weights."""


class Ask(EngineMessage):
    """Anything that takes no arguments."""

    what: Question


class EngineHello(EngineMessage):
    """The first word of the engine's process: ready, or why it never will be."""

    end_tokens: tuple[int, ...]
    error: str | None = None


class TokensFrame(EngineMessage):
    """New tokens of a request that runs on."""

    piece: Piece


class CompletionFrame(EngineMessage):
    """A completion, whole."""

    completion: Completion


class Scores(EngineMessage):
    """Log probabilities, sequence by sequence."""

    logprobs: list[list[float]]


class Answer(EngineMessage):
    """The result of a question or an update."""

    policy: ServedPolicy | None = None
    limits: EngineLimits | None = None
    stats: EngineStats | None = None
    seconds: float = 0.0


class FailureFrame(EngineMessage):
    """Why there is no answer; the class is kept by name."""

    kind: str
    message: str

    @classmethod
    def of(cls, number: int, error: Exception) -> "FailureFrame":
        kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in ERRORS), "")
        return cls(number, kind or "EngineError", str(error) if kind else f"{type(error).__name__}: {error}")

    def error(self) -> EngineError:
        return ERRORS.get(self.kind, EngineError)(self.message)


class ToEngine(msgspec.Struct, array_like=True):
    """A batch of messages from the client."""

    messages: list[Generate | Cancel | ScoreFrame | Load | Ask]


class FromEngine(msgspec.Struct, array_like=True):
    """A batch of messages from the engine: everything that happened since its last frame."""

    messages: list[EngineHello | TokensFrame | CompletionFrame | Scores | Answer | FailureFrame]
    busy_seconds: float = 0.0


_encoder = msgspec.msgpack.Encoder()
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def frame(batch: ToEngine | FromEngine) -> list[bytes]:
    body = _encoder.encode(batch)
    return [HEAD.pack(len(body)), body]


async def opened(door: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connected socket as streams, whether its other end is on this machine or elsewhere."""
    if door.family == socket.AF_UNIX:
        return await asyncio.open_unix_connection(sock=door)
    return await asyncio.open_connection(sock=door)


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame's body, or None when the other side is gone."""
    try:
        (length,) = HEAD.unpack(await reader.readexactly(HEAD.size))  # bounded: by the other side's life
        return await reader.readexactly(length)  # bounded: by the other side's life
    except (asyncio.IncompleteReadError, OSError):  # a machine that vanished is no ConnectionError
        return None


def join(pieces: Sequence[Piece]) -> Piece:
    """Several pieces of one completion as one."""
    if len(pieces) == 1:
        return pieces[0]
    top = None if pieces[0].top is None else [ranked for piece in pieces for ranked in piece.top or ()]
    return Piece(
        [token for piece in pieces for token in piece.token_ids],
        [logprob for piece in pieces for logprob in piece.logprobs],
        [version for piece in pieces for version in piece.versions],
        top,
    )
