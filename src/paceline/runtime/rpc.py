"""Remote calls of the orchestrator to a trainer: msgpack frames with raw buffers, never pickle."""

import traceback
from collections.abc import Awaitable
from pathlib import Path
from typing import Literal

import msgspec
from transformers import PreTrainedTokenizerBase

from paceline.clients.frames import HEAD
from paceline.data import Sample, decode
from paceline.errors import PacelineError
from paceline.trainer import StepReport, Trainer, TrainerError
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


class SentWeights(msgspec.Struct, array_like=True):
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
    sent: SentWeights | None = None


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


class TrainerRpcHandler:
    """Does with one trainer what a caller asks for. `log` keeps the traces of bugs off a person's screen: all ranks of
    several fail when one is lost, and one tells why."""

    def __init__(self, trainer: Trainer, tokenizer: PreTrainedTokenizerBase, log: Path | None = None) -> None:
        self.trainer, self._tokenizer, self._log = trainer, tokenizer, log
        self._fed: list[Sample] = []

    async def answer(self, call: RpcCall) -> RpcResult | RpcFailure:
        return await answered(call, self._do(call), self._log)

    async def _do(self, call: RpcCall) -> RpcResult:
        trainer, folder = self.trainer, Path(call.path)
        report = sent = None
        match call.what:
            case "feed":
                samples = decode(call.data)
                await trainer.feed(samples)
                self._fed += samples
            case "step":
                new, fed, self._fed = iter(decode(call.data)), self._fed, []
                report = await trainer.step([next(new) if at < 0 else fed[at] for at in call.order])
            case "weights":
                sent = await self._weights()
            case "save":
                await trainer.save(folder)
            case "load":
                self._fed = []
                await trainer.load(folder)
            case "export":
                await trainer.export(folder, self._tokenizer)
        return RpcResult(call.number, trainer.version, report, sent)

    async def _weights(self) -> SentWeights:
        """The metadata of the current weights, and where they are; the weights travel by another way."""
        raise NotImplementedError


async def answered(call: RpcCall, doing: Awaitable[RpcResult], log: Path | None = None) -> RpcResult | RpcFailure:
    """The call's result or failure. The traceback of a bug is printed on this side too, or written to `log`."""
    try:
        return await doing  # bounded: by the call itself
    except OSError as error:
        return RpcFailure(call.number, error.strerror or str(error), error.errno)
    except PacelineError as error:
        frames, trace = failure_traces(error)
        return RpcFailure(call.number, str(error), None, frames, trace)
    except Exception as error:
        if log is None:
            traceback.print_exc()
        else:
            with log.open("a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
        return RpcFailure(call.number, described(error), None, user_frames(error), whole(error))
