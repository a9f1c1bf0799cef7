"""Defines the messages of orchestrator and trainer: msgpack frames with raw buffers, never pickle."""

import traceback
from collections.abc import Awaitable
from pathlib import Path
from typing import Literal

import msgspec

from paceline.clients.frames import HEAD
from paceline.errors import PacelineError
from paceline.trainer import StepReport, TrainerError
from paceline.util.user_code import UserCodeError, described, failure_traces, user_frames, whole
from paceline.weights.update import Adapter, Canary

What = Literal["feed", "step", "weights", "save", "load", "export"]


class RpcHello(msgspec.Struct, array_like=True, tag=True):
    """The trainer's first word on every connection."""

    life: str
    """Another one after each restart of its process."""
    version: int
    parameters: int
    device: str
    ends: tuple[int, ...]
    """Tokens that end a turn."""


class RpcCall(msgspec.Struct, array_like=True):
    """One thing to do. Asked again under the same name and number it is not done again."""

    caller: str
    number: int
    what: What
    path: str = ""
    data: bytes = b""
    """Samples the trainer has not seen yet."""
    order: list[int] = []
    """The batch: positions among the samples fed before, -1 for the next of `data`."""


class Alive(msgspec.Struct, array_like=True, tag=True):
    """The trainer still works on it."""


class Sent(msgspec.Struct, array_like=True):
    """Weights, as the files they lie in."""

    version: int
    file: str
    adapter: Adapter | None
    expected: str
    canary: Canary | None
    deltas: list[str] = []
    """Files of the changes since that file was written, in order."""
    delta: str = ""
    """The file of changes from the version before, where there is one."""


class RpcResult(msgspec.Struct, array_like=True, tag=True):
    """The result of a call."""

    number: int
    version: int
    report: StepReport | None = None
    sent: Sent | None = None


class RpcFailure(msgspec.Struct, array_like=True, tag=True):
    """The failure of a call."""

    number: int
    message: str
    errno: int | None = None
    """Set where the system refused something, such as room on the disk."""
    frames: str = ""
    trace: str = ""
    """Of user code that raised: its own frames, and the whole traceback."""

    def error(self) -> Exception:
        """The exception that the caller raises."""
        if self.errno is not None:
            return OSError(self.errno, self.message)
        return UserCodeError(self.message, self.frames, self.trace) if self.frames else TrainerError(self.message)


FromTrainer = RpcHello | Alive | RpcResult | RpcFailure

_encoder = msgspec.msgpack.Encoder()
decode_call = msgspec.msgpack.Decoder(RpcCall).decode
decode_answer = msgspec.msgpack.Decoder(FromTrainer).decode


def framed(message: RpcCall | FromTrainer) -> bytes:
    body = _encoder.encode(message)
    return HEAD.pack(len(body)) + body


async def answered(call: RpcCall, doing: Awaitable[RpcResult], log: Path | None = None) -> RpcResult | RpcFailure:
    """The call's result or failure. The traceback of a bug is printed on this side too, or written to `log` where
    standard error is a person's screen."""
    try:
        return await doing  # bounded: by the call itself
    except OSError as error:
        return RpcFailure(call.number, error.strerror or str(error), error.errno)
    except PacelineError as error:
        frames, trace = failure_traces(error)
        return RpcFailure(call.number, str(error), None, frames, trace)
    except Exception as error:
        _keep_trace(log)
        return RpcFailure(call.number, described(error), None, user_frames(error), whole(error))


def _keep_trace(log: Path | None) -> None:
    if log is None:
        traceback.print_exc()
        return
    with log.open("a", encoding="utf-8") as file:
        traceback.print_exc(file=file)
