"""Trainer ranks as Ray actors, and all of them together as one trainer."""

import asyncio
import contextlib
import socket
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError
from ray.util import get_node_ip_address
from transformers import PreTrainedTokenizerBase

from paceline.cluster.local import pick_device
from paceline.cluster.processes.frames import Call, Done, Failed, FromTrainer, Hello, Sent, What, decode_call
from paceline.cluster.processes.host import life
from paceline.cluster.ranks import cost_of, spread
from paceline.cluster.ray.actors import Actor
from paceline.cluster.ray.engines import ObjectTensors, packed
from paceline.cluster.training import build_trainer
from paceline.config import RunConfig
from paceline.data import Sample, decode, encode
from paceline.data.balance import Cost
from paceline.errors import PacelineError
from paceline.model import end_tokens, load_tokenizer
from paceline.model.weights import WeightUpdate
from paceline.trainer import StepReport, TrainerError, TrainerLost
from paceline.trainer.joining import join
from paceline.waits import beat

PULSE_SECONDS = 5.0
ECHO_SECONDS = 5.0
"""How long the others are waited for once one rank has failed."""
START_SECONDS = 1800.0
"""For all ranks to be placed, to load the model and to meet."""
T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode
_answer = msgspec.msgpack.Decoder(FromTrainer).decode
_sent = msgspec.msgpack.Decoder(Sent).decode


class RankActor(Actor):
    """One rank: its share of the model, of each batch, and of each checkpoint."""

    async def meeting_place(self) -> tuple[str, int]:
        """Where the ranks can find one another, if this is the first of them."""
        with socket.socket() as door:
            door.bind(("", 0))
            return get_node_ip_address(), door.getsockname()[1]

    async def join(self, host: str, port: int, rank: int, world: int) -> tuple[bytes, tuple[float, float]]:
        """Meet the others and load the model; answers with a greeting, and with what a token and a pair of tokens cost
        to train."""
        return await asyncio.to_thread(self._join, f"{host}:{port}", rank, world)

    def _join(self, address: str, rank: int, world: int) -> tuple[bytes, tuple[float, float]]:
        backend = None if pick_device(self.config.device) == "cuda" else "gloo"
        group = join(rank, world, address, backend) if world > 1 else None
        built = build_trainer(self.config, group)
        self._trainer, self._tokenizer = built.trainer, load_tokenizer(self.config.model)
        ends = end_tokens(self._tokenizer, built.model)
        cost = cost_of(built.model.config)
        return _encode(Hello(life(), 0, built.parameters, built.device, ends)), (cost.linear, cost.attention)

    async def do(self, call: bytes) -> bytes:
        """Step, save, load or export, with all the others. Whatever goes wrong is an answer too."""
        asked = decode_call(call)
        try:
            return _encode(await self._do(asked))
        except OSError as error:
            return _encode(Failed(asked.number, error.strerror or str(error), error.errno))
        except PacelineError as error:
            return _encode(Failed(asked.number, str(error)))
        except Exception as error:  # a bug keeps its name there, and its trace in the log here
            traceback.print_exc()
            return _encode(Failed(asked.number, f"{type(error).__name__}: {error}"))

    async def _do(self, asked: Call) -> Done:
        trainer, folder = self._trainer, Path(asked.path)
        report = None
        match asked.what:
            case "step":
                report = await trainer.step(decode(asked.data))
            case "save":
                await trainer.save(folder)
            case "load":
                await trainer.load(folder)
            case "export":
                await trainer.export(folder, self._tokenizer)
            case what:
                raise ValueError(f"ranks are never asked to {what}")
        return Done(asked.number, trainer.version, report)

    async def weights(self) -> tuple[bytes, NDArray]:
        """What to say of the weights, and the weights themselves: on the first rank. The others lend a hand."""
        update = await self._trainer.weights()
        expected = await asyncio.to_thread(update.fingerprint)
        data = await asyncio.to_thread(packed, update.tensors)
        return _encode(Sent(update.version, "", update.adapter, expected, update.canary)), data


class RayTrainer:
    """Speaks the `Trainer` protocol to all ranks at once.

    If one of them dies the others wait for it in the middle of a sum: all are ended, what they knew is gone, and `load`
    starts new ones.
    """

    def __init__(self, config: RunConfig, start: Callable[[], Sequence[Any]]) -> None:
        self.version = 0
        self.hello: Hello | None = None
        self._config, self._start = config, start
        self._ranks: list[Any] = []
        self._cost = Cost(1.0, 0.0)
        self._number = 0

    async def meet(self) -> Hello:
        """Start the ranks and wait until they have met."""
        self._ranks = list(self._start())
        try:
            async with asyncio.timeout(START_SECONDS):
                host, port = (await self._together([self._ranks[0].meeting_place.remote()]))[0]
                world = len(self._ranks)
                joined = [rank.join.remote(host, port, i, world) for i, rank in enumerate(self._ranks)]
                (greeting, cost), *_ = await self._together(joined)
        except TimeoutError:
            raise TrainerError(
                f"the trainer's ranks were not up within {START_SECONDS:g} s: is there still room for them? See "
                "`paceline status`, then add --resume latest"
            ) from None
        hello, self._cost = _answer(greeting), Cost(*cost)
        assert isinstance(hello, Hello)
        self.hello, self.version = hello, 0
        return hello

    async def feed(self, samples: Sequence[Sample]) -> None:
        """Which rank trains what is decided when the batch is whole."""

    async def step(self, batch: Sequence[Sample]) -> StepReport:
        shares = spread(batch, len(self._ranks), self._config.trainer, self._cost)
        done = await self._call("step", shares=shares)
        assert done.report is not None
        return done.report

    async def weights(self) -> WeightUpdate:
        self._there()
        answers = [rank.weights.options(num_returns=2).remote() for rank in self._ranks]
        heads = await self._together([head for head, _ in answers])
        sent = _sent(heads[0])
        tensors = ObjectTensors(answers[0][1])
        return WeightUpdate(sent.version, tensors, sent.adapter, sent.expected, sent.canary)

    async def save(self, folder: Path) -> None:
        await self._call("save", path=folder)

    async def load(self, folder: Path) -> None:
        if not self._ranks:
            await self.meet()
        await self._call("load", path=folder)

    async def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Each rank has a tokenizer of its own."""
        await self._call("export", path=folder)

    def close(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            with contextlib.suppress(RayError):
                ray.kill(rank)

    # -- all at once --------------------------------------------------------------------------------------------------

    async def _call(self, what: What, *, path: Path | None = None, shares: Sequence[list[Sample]] = ()) -> Done:
        self._there()
        self._number += 1
        where = "" if path is None else str(path.resolve())
        calls = [
            Call("orchestrator", self._number, what, where, encode(share), [-1] * len(share))
            for share in (shares or [[] for _ in self._ranks])
        ]
        asked = zip(self._ranks, calls, strict=True)
        answers = await self._together([_done(rank.do.remote(_encode(call))) for rank, call in asked])
        self.version = answers[0].version
        return answers[0]

    def _there(self) -> None:
        if not self._ranks:
            raise TrainerLost("the trainer's ranks are gone")

    async def _together(self, answers: Sequence[Awaitable[T]]) -> list[T]:
        """What all answer, or the first failure: the others may then wait for that rank for ever, so all are ended.
        Bounded by the life of the ranks, and inside them by the process group's timeout."""
        waiting = {asyncio.ensure_future(answer): rank for rank, answer in enumerate(answers)}
        try:
            left = set(waiting)
            while left:
                done, left = await asyncio.wait(left, timeout=PULSE_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
                if done:
                    beat()  # whoever works over there moves the run
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
            if isinstance(error, RayError) and not isinstance(error, RayTaskError):
                return TrainerLost(f"rank {rank} of {len(self._ranks)} is lost: {_first_line(error)}")
        error = next(iter(errors.values()))
        if isinstance(error, RayTaskError):
            return TrainerError(_last_line(error))
        return error


async def _done(reference: Any) -> Done:
    answer = _answer(await reference)  # bounded: by the rank's life
    if isinstance(answer, Failed):
        raise TrainerError(answer.message) if answer.errno is None else OSError(answer.errno, answer.message)
    assert isinstance(answer, Done)
    return answer


def _last_line(error: BaseException) -> str:
    """What a remote traceback ends with."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
