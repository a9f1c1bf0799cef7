"""Runs a trainer rank and its engine in one process.

Entry point of every rank but the first: trains and samples as rank 0 says, and ends with it.

python -m paceline.runtime.colocated.worker      the run file as JSON on standard input, a seat in the variables
"""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.clients.frames import EngineHello, FromEngine, frame, opened, read_frame
from paceline.clients.host import EngineHost
from paceline.clients.link import EngineLink, received
from paceline.config import RunConfig
from paceline.data import Sample
from paceline.engine import EmbeddedEngine
from paceline.errors import PacelineError
from paceline.model import (
    attach_lora,
    end_tokens,
    engine_twin,
    load_model,
    load_tokenizer,
    quick_handover,
    small_products,
)
from paceline.runtime.colocated.rank_info import RankInfo
from paceline.runtime.colocated.rank_sockets import Doors, knock, told
from paceline.runtime.local import SMALL_MODEL
from paceline.runtime.processes.frames import RpcCall, RpcResult, Sent, decode_call, framed
from paceline.runtime.rank_group import RankRpcHandler
from paceline.runtime.torch_kit import background_compile, engine_for, pick_device
from paceline.trainer import StepReport, TorchTrainer
from paceline.trainer.torch.world import join, leave
from paceline.weights.update import WeightUpdate


class InPlace(dict[str, Tensor]):
    """Tensors of an update that the engine of every rank holds already: its own rank has put them there."""


class HomeEngine(EmbeddedEngine):
    """The engine of this process. It gets its weights from its rank; what the pool publishes then is no news."""

    async def load_weights(self, update: WeightUpdate) -> float:
        return 0.0 if isinstance(update.tensors, InPlace) else await super().load_weights(update)


class HomeLink(EngineLink):
    """The same for the engine of another rank: nothing is sent."""

    async def load_weights(self, update: WeightUpdate) -> float:
        return 0.0 if isinstance(update.tensors, InPlace) else await super().load_weights(update)


@dataclass(slots=True)
class ColocatedWorker:
    """One rank: its trainer and its engine, of which one sleeps while the other works. Speaks the `Trainer` protocol;
    all ranks must call the same methods in the same order."""

    trainer: TorchTrainer
    engine: EmbeddedEngine
    model: PreTrainedModel
    held: Mapping[str, Tensor]
    """The engine's own weights."""
    parameters: int
    device: str
    update: WeightUpdate | None = None
    """The last update that the engine loaded."""

    @property
    def version(self) -> int:
        return self.trainer.version

    @version.setter
    def version(self, version: int) -> None:
        self.trainer.version = version

    async def feed(self, samples: Sequence[Sample]) -> None:
        """An engine that is awake needs the device for itself."""

    async def step(self, batch: Sequence[Sample]) -> StepReport:
        """Requests wait where they are; nothing wakes the engine before it has the weights that come of this."""
        await self.engine.sleep()
        return await self.trainer.step(batch)

    async def weights(self) -> WeightUpdate:
        """Put the current weights into the engine and wake it. While it sleeps it reads nothing that is being written;
        then it notes the version, and proves that it holds what was gathered and computes what the trainer does."""
        await self.engine.sleep()
        update = await self.trainer.pour(self.held)
        await self.engine.load_weights(update)
        await self.engine.wake()
        self.update = update
        return update

    async def save(self, folder: Path) -> None:
        await self.trainer.save(folder)

    async def load(self, folder: Path) -> None:
        await self.trainer.load(folder)

    async def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        await self.trainer.export(folder, tokenizer)

    def close(self) -> None:
        self.engine.close()
        self.trainer.close()


class ColocatedRpcHandler(RankRpcHandler):
    """A rank's answers, of which its weights are only a name: they stay where they are."""

    async def _do(self, call: RpcCall) -> RpcResult:
        if call.what != "weights":
            return await super()._do(call)
        update = await self.trainer.weights()
        sent = Sent(update.version, "", update.adapter, update.expected or "", None)
        return RpcResult(call.number, update.version, sent=sent)


def meet(seat: RankInfo, config: RunConfig) -> ProcessGroup | None:
    """Wait for the other ranks; a GPU is chosen for the calling thread."""
    if seat.world == 1:
        return None
    backend = None if pick_device(config.device) == "cuda" else "gloo"
    return join(seat.rank, seat.world, None if seat.given else f"{seat.host}:{seat.port}", backend)


def move_in(config: RunConfig, seat: RankInfo, group: ProcessGroup | None, dumps: Path) -> ColocatedWorker:
    """Load the model for both. Under LoRA they share the frozen base unless it is sharded: what is to be cut up comes
    to the device layer by layer, so that beside the engine's model there is never a second whole one."""
    device, parallel = pick_device(config.device), config.trainer.parallel
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    in_parts = group is not None and parallel.shard != "none" and parallel.tensor == 1
    model = load_model(config.model, "cpu" if in_parts else place)
    served = engine_twin(model, config.model)
    served.to(place)
    model = attach_lora(model, config.model, config.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = take_turns(config, parameters, seat.neighbours)
    engine = engine_for(served, config, HomeEngine)
    try:
        trainer = TorchTrainer(
            model,
            config.trainer,
            total_steps=config.steps,
            fp32_head=config.model.fp32_head,
            dumps=dumps,
            group=group,
            device=place,
            background=background_compile("trainer", config, model) if group is None else None,
        )
        engine.start()
    except BaseException:
        engine.close()
        raise
    return ColocatedWorker(trainer, engine, model, dict(served.named_parameters()), parameters, device)


def take_turns(config: RunConfig, parameters: int, neighbours: int) -> RunConfig:
    """Engine and trainer never compute at once, so each gets all cores that fall to its rank."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // neighbours)
    engine = 1 if parameters < SMALL_MODEL else share
    return config.model_copy(
        update={
            "engine": config.engine.model_copy(update={"threads": config.engine.threads or engine}),
            "trainer": config.trainer.model_copy(update={"threads": config.trainer.threads or share}),
        }
    )


ORPHANED = 125
"""Exit code of a rank that rank 0 has left without a word."""
END = b"end"
"""Rank 0's last word to a rank that did its work."""


def follow(config: RunConfig, seat: RankInfo) -> None:
    """Be a rank until rank 0 ends the run, however it does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would not hear it while it waits for the others
    group = meet(seat, config)
    assert group is not None
    doors = knock(seat, *told(group))
    # From here on rank 0 is the one to hear signals: it ends the run in good order, and all others with itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    lifeline = Lifeline(doors.life)
    config = RunConfig.model_validate_json(_first_frame(doors.trainer))
    tokenizer = load_tokenizer(config.model)
    try:
        resident = move_in(config, seat, group, Path(config.runs) / config.name / "dumps")
    except PacelineError as error:
        doors.engine.sendall(b"".join(frame(FromEngine([EngineHello(0, (), f"rank {seat.rank}: {error}")]))))
        raise
    with small_products(resident.model.dtype), quick_handover(resident.device):
        desk = ColocatedRpcHandler(resident, tokenizer)
        asyncio.run(_obey(doors, desk, resident, end_tokens(tokenizer, resident.model)))
    lifeline.rest()
    resident.close()
    leave()
    doors.close()


async def _obey(doors: Doors, desk: ColocatedRpcHandler, resident: ColocatedWorker, ends: tuple[int, ...]) -> None:
    """Train and sample until rank 0 hangs up."""
    sampling = asyncio.ensure_future(EngineHost(resident.engine, ends).serve(doors.engine))
    reader, writer = await opened(doors.trainer)
    while (body := await read_frame(reader)) is not None:
        writer.write(framed(await desk.answer(decode_call(body))))
    sampling.cancel()
    await asyncio.wait([sampling], timeout=1.0)


class Lifeline:
    """Watches a connection from a thread of its own: whatever this rank is doing, it ends when rank 0 is gone. Others
    would wait for it in vain, and nothing needs to be saved here: the run resumes from its checkpoint."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self._said = threading.Event()
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def rest(self) -> None:
        """Rank 0 has hung up: go on only if it said that this is the end."""
        if not self._said.wait(timeout=10.0):
            os._exit(ORPHANED)

    def _watch(self) -> None:
        try:
            said = self._door.recv(len(END), socket.MSG_WAITALL)  # unbounded: as long as rank 0 lives
        except OSError:  # its machine is gone
            said = b""
        if said != END:
            os._exit(ORPHANED)
        self._said.set()


def _first_frame(door: socket.socket) -> bytes:
    body = received(door)
    if body is None:
        raise PacelineError("rank 0 ended before it said what to do")
    return body


def main() -> int:
    config = RunConfig.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_until_parent_ends, name="parent", daemon=True).start()
    seat = RankInfo.found()
    assert seat is not None
    try:
        follow(config, seat)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _until_parent_ends() -> None:
    """Before the ranks have met there is no connection to watch, but there is the pipe."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
