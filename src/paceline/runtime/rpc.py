"""Remote calls of the orchestrator to a trainer: messages, the handler that answers them, and groups of ranks.

All that goes over a connection is msgpack frames with raw buffers, never pickle.
"""

import asyncio
import traceback
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from paceline.clients.rpc import FRAME_HEADER
from paceline.clients.rpc import encode as encode_message
from paceline.config import RunConfig
from paceline.data import Sample, decode, encode
from paceline.data.packing import Cost, owners
from paceline.data.sample import TokenScores
from paceline.errors import PacelineError
from paceline.trainer import StepReport, Trainer, TrainerError
from paceline.util.deadlines import record_progress
from paceline.util.user_code import UserCodeError, describe_error, failure_traces, full_traceback, user_frames
from paceline.weights.update import Adapter, Canary

RpcMethod = Literal["feed", "step", "weights", "save", "load", "export"]


class RpcHello(msgspec.Struct, array_like=True, tag=True):
    """The trainer's first word on every connection."""

    parameters: int
    device: str
    ends: tuple[int, ...]
    """Tokens that end a turn."""
    incarnation: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    """Another one after each restart of its process."""


class RpcCall(msgspec.Struct, array_like=True):
    """One thing to do. Asked again under the same name and number it is not done again."""

    caller: str
    number: int
    method: RpcMethod
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
    number: int
    version: int
    report: StepReport | None = None
    sent: SentWeights | None = None


class RpcFailure(msgspec.Struct, array_like=True, tag=True):
    number: int
    message: str
    errno: int | None = None
    """Set where the system refused something, such as room on the disk."""
    frames: str = ""
    trace: str = ""
    """Of user code that raised: its own frames, and the whole traceback."""

    def error(self) -> Exception:
        if self.errno is not None:
            return OSError(self.errno, self.message)
        return UserCodeError(self.message, self.frames, self.trace) if self.frames else TrainerError(self.message)


RpcAnswer = RpcResult | RpcFailure
FromTrainer = RpcHello | Alive | RpcAnswer

decode_call = msgspec.msgpack.Decoder(RpcCall).decode
decode_from_trainer = msgspec.msgpack.Decoder(FromTrainer).decode
decode_answer = msgspec.msgpack.Decoder(RpcAnswer).decode


def encode_frame(message: RpcCall | FromTrainer) -> bytes:
    body = encode_message(message)
    return FRAME_HEADER.pack(len(body)) + body


class RpcTrainer(ABC):
    """Speaks the `Trainer` protocol by calls to one trainer or more in other processes."""

    def __init__(self) -> None:
        self.version = 0
        self._name = uuid.uuid4().hex
        self._numbers = count(1)

    def _make_call(
        self, method: RpcMethod, folder: Path | None, samples: Sequence[Sample] = (), order: Sequence[int] = ()
    ) -> RpcCall:
        path = "" if folder is None else str(folder.resolve())
        return RpcCall(self._name, next(self._numbers), method, path, encode(samples), list(order))

    @abstractmethod
    async def _call(self, method: RpcMethod, folder: Path | None = None) -> Any: ...

    async def save(self, folder: Path) -> None:
        await self._call("save", folder)

    async def load(self, folder: Path) -> None:
        await self._call("load", folder)

    async def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """The other side has a tokenizer of its own."""
        await self._call("export", folder)


class TrainerRpcHandler:
    """Does with one trainer what a caller asks for. `log` keeps the traces of bugs off a person's screen: all ranks of
    several fail when one is lost, and one tells why."""

    def __init__(self, trainer: Trainer, tokenizer: PreTrainedTokenizerBase, log: Path | None = None) -> None:
        self.trainer, self._tokenizer, self._log = trainer, tokenizer, log
        self._fed: list[Sample] = []

    async def answer(self, call: RpcCall) -> RpcAnswer:
        """The call's result or failure. The traceback of a bug is printed on this side too, or written to the log."""
        try:
            return await self._do(call)  # bounded: by the call itself
        except OSError as error:
            return RpcFailure(call.number, error.strerror or str(error), error.errno)
        except PacelineError as error:
            frames, trace = failure_traces(error)
            return RpcFailure(call.number, str(error), None, frames, trace)
        except Exception as error:
            with self._log.open("a", encoding="utf-8") if self._log else nullcontext() as file:
                traceback.print_exc(file=file)
            return RpcFailure(call.number, describe_error(error), None, user_frames(error), full_traceback(error))

    async def _do(self, call: RpcCall) -> RpcResult:
        trainer, folder = self.trainer, Path(call.path)
        report = sent = None
        match call.method:
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


def split_batch(batch: Sequence[Sample], ranks: int, cost: Cost) -> list[list[Sample]]:
    """One share of the batch for each rank: neighbours, the first rank's first, so that the shares end to end are the
    batch again. Of like cost, and a rollout's samples stay together, for a rank that trains its share as it comes."""
    rollouts: dict[Hashable, list[Sample]] = {}
    for owner, sample in zip(owners(batch), batch, strict=True):
        rollouts.setdefault(owner, []).append(sample)
    costs = np.array([cost([len(sample) for sample in samples]) for samples in rollouts.values()])
    shares: list[list[Sample]] = [[] for _ in range(ranks)]
    middles = np.cumsum(costs) - costs / 2
    for samples, middle in zip(rollouts.values(), middles, strict=True):
        shares[int(ranks * middle / costs.sum())] += samples
    return shares


PULSE_SECONDS = 5.0
ECHO_SECONDS = 5.0
"""How long the others are waited for once one rank has failed."""
T = TypeVar("T")


class RankGroup(RpcTrainer):
    """All ranks as one trainer: each gets its share of a batch, and all do the same things in the same order. If one of
    them dies the others wait for it in the middle of a sum, so all are ended."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self._config = config
        self._ranks: Sequence[Any] = ()
        self._cost = Cost(1.0, 0.0)

    async def feed(self, samples: Sequence[Sample]) -> None:
        """Does nothing: samples are assigned to ranks when the batch is whole."""

    async def step(self, batch: Sequence[Sample]) -> StepReport:
        parallel = self._config.trainer.parallel
        shares = split_batch(batch, parallel.data_ranks, self._cost)
        alike = parallel.ranks // parallel.data_ranks  # neighbours that train the same samples
        done = await self._call("step", shares=[share for share in shares for _ in range(alike)])
        reports = [result.report for result in done if result.report is not None]
        return replace(reports[0], scores=TokenScores.merged(report.scores for report in reports))

    # -- what depends on how ranks are reached ------------------------------------------------------------------------

    @abstractmethod
    def _ask(self, rank: Any, call: RpcCall) -> Awaitable[RpcAnswer]: ...

    @abstractmethod
    def _require_ranks(self) -> None:
        """Raise unless all ranks are up."""

    @abstractmethod
    def _rank_lost_error(self, rank: int, error: BaseException) -> BaseException | None:
        """The error to raise if this one means that the rank is lost; None if it only says what went wrong."""

    @abstractmethod
    def close(self) -> None:
        """End all ranks."""

    # -- all at once --------------------------------------------------------------------------------------------------

    async def _call(
        self, method: RpcMethod, folder: Path | None = None, shares: Sequence[list[Sample]] = ()
    ) -> list[RpcResult]:
        self._require_ranks()
        calls = [
            self._make_call(method, folder, share, [-1] * len(share)) for share in (shares or [[] for _ in self._ranks])
        ]
        asked = [_unwrap(self._ask(rank, call)) for rank, call in zip(self._ranks, calls, strict=True)]
        answers = await self._gather_ranks(asked)
        self.version = answers[0].version
        return answers

    async def _gather_ranks(self, answers: Sequence[Awaitable[T]]) -> list[T]:
        """All answers, or the first failure: the others may then wait for that rank for ever, so all are ended.
        Bounded by the life of the ranks, and inside them by the process group's timeout."""
        waiting = {asyncio.ensure_future(answer): rank for rank, answer in enumerate(answers)}
        try:
            left = set(waiting)
            while left:
                done, left = await asyncio.wait(left, timeout=PULSE_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
                if done:
                    record_progress()  # a rank's answer is progress of the run
                if any(task.exception() for task in done):
                    # A rank that dies is missed by the others first: the cause comes a moment after its echo.
                    late, left = await asyncio.wait(left, timeout=ECHO_SECONDS) if left else (set(), left)
                    raise self._cause({waiting[task]: task.exception() for task in (*done, *late)})
            return [task.result() for task in waiting]  # bounded: all are done
        except BaseException:
            self.close()
            raise
        finally:
            for task in waiting:
                task.cancel()

    def _cause(self, ended: Mapping[int, BaseException | None]) -> BaseException:
        """A lost rank rather than what the others say of it."""
        errors = {rank: error for rank, error in ended.items() if error is not None}
        for rank, error in errors.items():
            if (lost := self._rank_lost_error(rank, error)) is not None:
                return lost
        return next(iter(errors.values()))


async def _unwrap(answer: Awaitable[RpcAnswer]) -> RpcResult:
    result = await answer  # bounded: by the rank's life
    if isinstance(result, RpcFailure):
        raise result.error()
    return result
