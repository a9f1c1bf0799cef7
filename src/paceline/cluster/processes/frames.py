"""What orchestrator and trainer say to one another: msgpack frames with raw buffers, never pickle."""

from typing import Literal

import msgspec

from paceline.inference.frames import HEAD
from paceline.model.weights import Adapter, Canary
from paceline.trainer import StepReport, TrainerError
from paceline.user_code import UserCodeError

What = Literal["feed", "step", "weights", "save", "load", "export"]


class Hello(msgspec.Struct, array_like=True, tag=True):
    """The trainer's first word on every connection."""

    life: str
    """Another one after each restart of its process."""
    version: int
    parameters: int
    device: str
    ends: tuple[int, ...]
    """Tokens that end a turn."""


class Call(msgspec.Struct, array_like=True):
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
    """What was changed since that file was written, in order."""
    delta: str = ""
    """The way here from the version before, where there is one."""


class Done(msgspec.Struct, array_like=True, tag=True):
    """What a call came to."""

    number: int
    version: int
    report: StepReport | None = None
    sent: Sent | None = None


class Failed(msgspec.Struct, array_like=True, tag=True):
    """Why a call came to nothing."""

    number: int
    message: str
    errno: int | None = None
    """Set where the system refused something, such as room on the disk."""
    frames: str = ""
    trace: str = ""
    """Of user code that raised: its own frames, and the whole traceback."""

    def error(self) -> Exception:
        """What the caller is to raise."""
        if self.errno is not None:
            return OSError(self.errno, self.message)
        return UserCodeError(self.message, self.frames, self.trace) if self.frames else TrainerError(self.message)


FromTrainer = Hello | Alive | Done | Failed

_encoder = msgspec.msgpack.Encoder()
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_answer = msgspec.msgpack.Decoder(FromTrainer).decode


def framed(message: Call | FromTrainer) -> bytes:
    body = _encoder.encode(message)
    return HEAD.pack(len(body)) + body
