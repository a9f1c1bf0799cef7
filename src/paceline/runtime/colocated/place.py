"""Runs a `colocated` rank: a trainer and its engine in one process. Rank 0 leads the others, which end with it.

python -m paceline.runtime.colocated.place      the run file as JSON on standard input, the rank in the variables
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedTokenizerBase

from paceline.clients.link import EngineLink, receive_frame
from paceline.clients.rpc import FRAME_HEADER, EngineHost, open_streams, read_frame
from paceline.config import RunConfig
from paceline.engine import EmbeddedEngine
from paceline.errors import PacelineError
from paceline.model import (
    attach_lora,
    avoid_onednn_on_arm,
    clone_for_engine,
    end_tokens,
    load_tokenizer,
    short_switch_interval,
)
from paceline.observe.monitor import RunDirectory
from paceline.runtime import rpc
from paceline.runtime.colocated import ranks
from paceline.runtime.local import RunParts, prepare, share_cores
from paceline.runtime.torch_parts import engine_for, join_ranks, load_rank_model, torch_trainer
from paceline.trainer import TorchTrainer, TrainerError
from paceline.trainer.backend import cost_of
from paceline.trainer.torch.world import abort_group, destroy_group
from paceline.util.child_process import ORPHANED
from paceline.weights.update import WeightUpdate


class InPlaceTensors(dict[str, Tensor]):
    """Tensors of an update that the engine of every rank holds already: its own rank has put them there."""


class ColocatedEngine(EmbeddedEngine):
    """The engine of this process. It gets its weights from its rank; what the pool publishes then is no news."""

    async def load_weights(self, update: WeightUpdate) -> float:
        return 0.0 if isinstance(update.tensors, InPlaceTensors) else await super().load_weights(update)


class ColocatedLink(EngineLink):
    """The same for the engine of another rank: nothing is sent."""

    async def load_weights(self, update: WeightUpdate) -> float:
        return 0.0 if isinstance(update.tensors, InPlaceTensors) else await super().load_weights(update)


class ColocatedWorker(rpc.TrainerRpcHandler):
    """One rank: its trainer and its engine, of which one sleeps while the other works. Its weights stay where they are.
    All ranks must get the same calls in the same order."""

    trainer: TorchTrainer
    update: WeightUpdate
    """The last that the engine loaded."""

    def __init__(
        self,
        config: RunConfig,
        info: ranks.RankInfo,
        group: ProcessGroup | None,
        tokenizer: PreTrainedTokenizerBase,
        bad_batches: Path,
        log: Path | None = None,
    ) -> None:
        """Load the model for both, which never compute at once. Under LoRA they share the frozen base unless it is
        sharded: then there is never a second whole model beside the engine's."""
        model, place = load_rank_model(config, group)
        served = clone_for_engine(model, config.model)
        served.to(place)
        self.model, self.device = attach_lora(model, config.model, config.seed), place.type
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._held = dict(served.named_parameters())
        """The engine's own weights."""
        config = share_cores(config, self.parameters, info.local_world_size, at_once=False)
        self.engine = engine_for(served, config, ColocatedEngine)
        try:
            super().__init__(torch_trainer(config, self.model, bad_batches, group, place), tokenizer, log)
            self.engine.start()
        except BaseException:
            self.engine.close()
            raise

    async def _do(self, call: rpc.RpcCall) -> rpc.RpcResult:
        if call.method == "step":  # requests wait where they are; only the weights that come of this wake the engine
            await self.engine.sleep()
        return await super()._do(call)

    async def _weights(self) -> rpc.SentWeights:
        """Put the current weights into the engine and wake it. While it sleeps it reads nothing that is being written;
        then it notes the version, and proves that it holds what was gathered and computes what the trainer does."""
        await self.engine.sleep()
        update = await self.trainer.copy_into(self._held)
        await self.engine.load_weights(update)
        await self.engine.wake()
        self.update = update
        return rpc.SentWeights(update.version, "", update.adapter, update.expected or "", None)

    def close(self) -> None:
        self.engine.close()
        self.trainer.close()


def share_address(group: ProcessGroup, port: int = 0, token: bytes = bytes(ranks.TOKEN_BYTES)) -> tuple[int, bytes]:
    """The port and the token of rank 0, which it gives to all ranks."""
    data = torch.tensor([port, *token])
    dist.broadcast(data, src=0, group=group)
    port, *numbers = data.tolist()
    return port, bytes(numbers)


END = b"end"
"""Rank 0's last word to a rank that did its work."""


def run_follower(config: RunConfig, info: ranks.RankInfo) -> None:
    """Be a rank until rank 0 ends the run, however it does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would not hear it while it waits for the others
    group = join_ranks(config, info.rank, info.world, info.rendezvous_address)
    assert group is not None
    sockets = ranks.connect_to_rank_0(info, *share_address(group))
    # From here on rank 0 is the one to hear signals: it ends the run in good order, and all others with itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ended = watch_rank_0(sockets.life)
    if (text := receive_frame(sockets.trainer)) is None:
        raise PacelineError("rank 0 ended before it said what to do")
    config = RunConfig.model_validate_json(text)
    tokenizer = load_tokenizer(config.model)
    try:
        worker = ColocatedWorker(config, info, group, tokenizer, Path(config.runs) / config.name / "dumps")
    except PacelineError as error:
        EngineHost.refuse(sockets.engine, f"rank {info.rank}: {error}")
        raise
    with avoid_onednn_on_arm(worker.model.dtype), short_switch_interval(worker.device):
        asyncio.run(_serve(sockets, worker, end_tokens(tokenizer, worker.model)))
    if not ended.wait(timeout=10.0):  # rank 0 has hung up: go on only if it said that this is the end
        os._exit(ORPHANED)
    worker.close()
    destroy_group()
    sockets.close()


async def _serve(sockets: ranks.RankSockets, worker: ColocatedWorker, ends: tuple[int, ...]) -> None:
    """Train and sample until rank 0 hangs up."""
    sampling = asyncio.ensure_future(EngineHost(worker.engine, ends).serve(sockets.engine))
    reader, writer = await open_streams(sockets.trainer)
    while (body := await read_frame(reader)) is not None:
        writer.write(rpc.encode_frame(await worker.answer(rpc.decode_call(body))))
    sampling.cancel()
    await asyncio.wait([sampling], timeout=1.0)


def watch_rank_0(sock: socket.socket) -> threading.Event:
    """Watch a connection from a thread of its own: whatever this rank is doing, it ends when rank 0 is gone. Others
    would wait for it in vain, and nothing needs to be saved here: the run resumes from its checkpoint. The event is set
    once rank 0 says that the run has ended."""
    ended = threading.Event()

    def watch() -> None:
        try:
            data = sock.recv(len(END), socket.MSG_WAITALL)  # unbounded: as long as rank 0 lives
        except OSError:  # its machine is gone
            data = b""
        if data != END:
            os._exit(ORPHANED)
        ended.set()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    return ended


LOOK_SECONDS = 0.2
T = TypeVar("T")


@dataclass(slots=True)
class RankLink:
    """Asks another rank, one thing at a time."""

    _sock: socket.socket
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def answer(self, call: rpc.RpcCall) -> rpc.RpcAnswer:
        self._streams = reader, writer = self._streams or await open_streams(self._sock)
        writer.write(rpc.encode_frame(call))
        if (body := await read_frame(reader)) is None:
            raise ConnectionError  # the rank is gone
        return rpc.decode_answer(body)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._sock.close()


class ColocatedTrainer(rpc.RankGroup):
    """All ranks, this process's included, as one trainer. A lost rank ends the run."""

    def __init__(
        self, config: RunConfig, worker: ColocatedWorker, others: Sequence[RankLink], why: Callable[[int], str]
    ) -> None:
        super().__init__(config)
        self._worker, self._others, self._why = worker, others, why
        self._ranks = [worker, *others]
        self._cost = cost_of(worker.model.config)
        self.broken = False
        """Whether the ranks can no longer be asked: some may wait for others for ever."""

    async def weights(self) -> WeightUpdate:
        """All engines hold them when this answers: the update only says which they are."""
        sent = [done.sent for done in await self._call("weights")]
        marks = [(each.version, each.expected) for each in sent if each is not None]
        if len(set(marks)) != 1:
            raise TrainerError(f"the ranks hold different weights, as version and fingerprint say: {marks}")
        return replace(self._worker.update, tensors=InPlaceTensors(self._worker.update.tensors))

    def close(self) -> None:
        """The other ranks end: rank 0 says nothing more to them."""
        self.broken = True
        for link in self._others:
            link.close()

    def _ask(self, rank: ColocatedWorker | RankLink, call: rpc.RpcCall) -> Awaitable[rpc.RpcAnswer]:
        return rank.answer(call)

    def _require_ranks(self) -> None:
        if self.broken:
            raise TrainerError("the other ranks have ended: add --resume latest")

    def _rank_lost_error(self, rank: int, error: BaseException) -> BaseException | None:
        if not isinstance(error, ConnectionError):
            return None
        return TrainerError(f"rank {rank} of {len(self._ranks)} is lost: {self._why(rank)}; go on with --resume latest")


@asynccontextmanager
async def colocated_placement(
    info: ranks.RankInfo, config: RunConfig, run_folder: Path, phase: Callable[[str], None], given: Any
) -> AsyncGenerator[RunParts]:
    """Connect the other ranks, load the model on all of them, and end them with the run."""
    async with AsyncExitStack() as stack:
        driver = prepare(config, phase, given)
        config = driver.config.model_copy(update={"runs": str(Path(config.runs).resolve())})
        live = RunDirectory(run_folder).live
        live.mkdir(parents=True, exist_ok=True)
        processes = ranks.RankProcesses.start(config, info, live)
        stack.callback(processes.end)

        phase(f"loading {config.model.name} on {info.world} ranks")
        build = partial(
            ColocatedWorker, tokenizer=driver.tokenizer, bad_batches=run_folder / "dumps", log=live / "rank-0.log"
        )
        worker, sockets = await _run_unless_rank_dies(processes, lambda: _connect_ranks(info, config, build))
        trainer = ColocatedTrainer(config, worker, [RankLink(other.trainer) for other in sockets], processes.cause)
        stack.callback(_disconnect_ranks, trainer, worker, sockets)
        links = [ColocatedLink(other.engine) for other in sockets]
        for link in links:
            await _run_unless_rank_dies(processes, link.start)
            stack.callback(link.close)
        pool = driver.pool([worker.engine, *links])
        stack.callback(pool.close)
        ends = end_tokens(driver.tokenizer, worker.model)
        if info.by_torchrun and threading.current_thread() is threading.main_thread():
            # A torchrun that has lost a rank ends all others: this one is about to, and has a sentence to say first.
            stack.callback(signal.signal, signal.SIGTERM, signal.SIG_IGN)
        with avoid_onednn_on_arm(worker.model.dtype), short_switch_interval(worker.device):
            yield driver.build_run_parts(pool, trainer, ends, worker.device, worker.parameters)


def _connect_ranks(
    info: ranks.RankInfo, config: RunConfig, build: Callable[..., ColocatedWorker]
) -> tuple[ColocatedWorker, list[ranks.RankSockets]]:
    """All of it on one thread, for a thread is what a GPU is chosen for."""
    sockets: list[ranks.RankSockets] = []
    group = join_ranks(config, info.rank, info.world, info.rendezvous_address)
    try:
        if group is not None:
            with ranks.open_listener(info.host if info.local_world_size == info.world else "") as sock:
                _, token = share_address(group, sock.getsockname()[1], secrets.token_bytes(ranks.TOKEN_BYTES))
                sockets = ranks.accept_ranks(sock, info.world, token)
        text = config.model_dump_json().encode()
        for other in sockets:
            other.trainer.sendall(FRAME_HEADER.pack(len(text)) + text)
        return build(config, info, group), sockets
    except BaseException:
        for other in sockets:
            other.close()
        raise


async def _run_unless_rank_dies(processes: ranks.RankProcesses, work: Callable[[], T]) -> T:
    """Run `work`, which waits for other ranks, in a thread that is left behind if one of them dies first."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="meeting the ranks", daemon=True).start()
    waiting = asyncio.wrap_future(done)
    try:
        while not (await asyncio.wait([waiting], timeout=LOOK_SECONDS))[0] and processes.dead() is None:
            pass
        if (rank := processes.dead()) is not None:  # what this rank says of it is an echo: the cause is over there
            raise PacelineError(f"rank {rank} did not come up: {processes.cause(rank)}")
        return waiting.result()  # bounded: it is done
    finally:
        waiting.cancel()


def _disconnect_ranks(trainer: ColocatedTrainer, worker: ColocatedWorker, sockets: Sequence[ranks.RankSockets]) -> None:
    """A run that ends in good order says so, and the others end too; after a failure they are gone, or are left to end
    by themselves, and what this rank still waits for from them is called off."""
    broken = trainer.broken
    for other in sockets if not broken else ():
        with contextlib.suppress(OSError):
            other.life.sendall(END)
    trainer.close()
    for other in sockets:
        other.close()
    if broken:
        abort_group()
    worker.close()
    destroy_group()


def main() -> int:
    config = RunConfig.model_validate_json(sys.stdin.buffer.readline())
    info = ranks.RankInfo.from_torchrun_env()
    assert info is not None
    try:
        run_follower(config, info)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
