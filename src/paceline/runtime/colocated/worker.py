"""Runs a trainer rank and its engine in one process; ranks other than the first do as rank 0 says, and end with it.

python -m paceline.runtime.colocated.worker      the run file as JSON on standard input, the rank in the variables
"""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.clients.link import EngineLink, received
from paceline.clients.rpc import EngineHello, EngineHost, FromEngine, frame, opened, read_frame
from paceline.config import RunConfig
from paceline.engine import EmbeddedEngine
from paceline.errors import PacelineError
from paceline.model import (
    attach_lora,
    end_tokens,
    engine_twin,
    load_tokenizer,
    quick_handover,
    small_products,
)
from paceline.runtime.colocated.ranks import TOKEN_BYTES, RankInfo, RankSockets, connect_to_rank_0
from paceline.runtime.local import share_cores
from paceline.runtime.rpc import RpcCall, RpcResult, SentWeights, TrainerRpcHandler, decode_call, framed
from paceline.runtime.torch_backend import engine_for, load_rank_model, pick_device, torch_trainer
from paceline.trainer import TorchTrainer
from paceline.trainer.torch.world import join, leave
from paceline.util.process_exit import ORPHANED, exit_with_stdin
from paceline.weights.update import WeightUpdate


class HeldTensors(dict[str, Tensor]):
    """Tensors of an update that the engine of every rank holds already: its own rank has put them there."""


class ColocatedEngine(EmbeddedEngine):
    """The engine of this process. It gets its weights from its rank; what the pool publishes then is no news."""

    async def load_weights(self, update: WeightUpdate) -> float:
        return 0.0 if isinstance(update.tensors, HeldTensors) else await super().load_weights(update)


class ColocatedLink(EngineLink):
    """The same for the engine of another rank: nothing is sent."""

    async def load_weights(self, update: WeightUpdate) -> float:
        return 0.0 if isinstance(update.tensors, HeldTensors) else await super().load_weights(update)


@dataclass(slots=True)
class ColocatedWorker:
    """One rank: its trainer and its engine, of which one sleeps while the other works."""

    trainer: TorchTrainer
    engine: EmbeddedEngine
    model: PreTrainedModel
    held: Mapping[str, Tensor]
    """The engine's own weights."""
    parameters: int
    device: str
    update: WeightUpdate | None = None
    """The last update that the engine loaded."""

    def close(self) -> None:
        self.engine.close()
        self.trainer.close()


class ColocatedRpcHandler(TrainerRpcHandler):
    """Answers for one rank, whose weights stay where they are. All ranks must get the same calls in the same order."""

    def __init__(self, worker: ColocatedWorker, tokenizer: PreTrainedTokenizerBase, log: Path | None = None) -> None:
        super().__init__(worker.trainer, tokenizer, log)
        self.worker = worker

    async def _do(self, call: RpcCall) -> RpcResult:
        if call.what == "step":  # requests wait where they are; only the weights that come of this wake the engine
            await self.worker.engine.sleep()
        return await super()._do(call)

    async def _weights(self) -> SentWeights:
        """Put the current weights into the engine and wake it. While it sleeps it reads nothing that is being written;
        then it notes the version, and proves that it holds what was gathered and computes what the trainer does."""
        engine = self.worker.engine
        await engine.sleep()
        update = await self.worker.trainer.pour(self.worker.held)
        await engine.load_weights(update)
        await engine.wake()
        self.worker.update = update
        return SentWeights(update.version, "", update.adapter, update.expected or "", None)


def meet(info: RankInfo, config: RunConfig) -> ProcessGroup | None:
    """Wait for the other ranks; a GPU is chosen for the calling thread."""
    if info.world == 1:
        return None
    backend = None if pick_device(config.device) == "cuda" else "gloo"
    return join(info.rank, info.world, None if info.given else f"{info.host}:{info.port}", backend)


def build_worker(config: RunConfig, info: RankInfo, group: ProcessGroup | None, dumps: Path) -> ColocatedWorker:
    """Load the model for both, which never compute at once. Under LoRA they share the frozen base unless it is sharded:
    then there is never a second whole model beside the engine's."""
    model, place = load_rank_model(config, group)
    served = engine_twin(model, config.model)
    served.to(place)
    model = attach_lora(model, config.model, config.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = share_cores(config, parameters, info.neighbours, at_once=False)
    engine = engine_for(served, config, ColocatedEngine)
    try:
        trainer = torch_trainer(config, model, dumps, group, place)
        engine.start()
    except BaseException:
        engine.close()
        raise
    return ColocatedWorker(trainer, engine, model, dict(served.named_parameters()), parameters, place.type)


def share_address(group: ProcessGroup, port: int = 0, token: bytes = bytes(TOKEN_BYTES)) -> tuple[int, bytes]:
    """The port and the token of rank 0, which it gives to all ranks."""
    data = torch.tensor([port, *token])
    dist.broadcast(data, src=0, group=group)
    port, *numbers = data.tolist()
    return port, bytes(numbers)


END = b"end"
"""Rank 0's last word to a rank that did its work."""


def follow(config: RunConfig, info: RankInfo) -> None:
    """Be a rank until rank 0 ends the run, however it does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would not hear it while it waits for the others
    group = meet(info, config)
    assert group is not None
    sockets = connect_to_rank_0(info, *share_address(group))
    # From here on rank 0 is the one to hear signals: it ends the run in good order, and all others with itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ended = watch_rank_0(sockets.life)
    if (text := received(sockets.trainer)) is None:
        raise PacelineError("rank 0 ended before it said what to do")
    config = RunConfig.model_validate_json(text)
    tokenizer = load_tokenizer(config.model)
    try:
        worker = build_worker(config, info, group, Path(config.runs) / config.name / "dumps")
    except PacelineError as error:
        sockets.engine.sendall(b"".join(frame(FromEngine([EngineHello(0, (), f"rank {info.rank}: {error}")]))))
        raise
    with small_products(worker.model.dtype), quick_handover(worker.device):
        handler = ColocatedRpcHandler(worker, tokenizer)
        asyncio.run(_serve(sockets, handler, worker, end_tokens(tokenizer, worker.model)))
    if not ended.wait(timeout=10.0):  # rank 0 has hung up: go on only if it said that this is the end
        os._exit(ORPHANED)
    worker.close()
    leave()
    sockets.close()


async def _serve(
    sockets: RankSockets, handler: ColocatedRpcHandler, worker: ColocatedWorker, ends: tuple[int, ...]
) -> None:
    """Train and sample until rank 0 hangs up."""
    sampling = asyncio.ensure_future(EngineHost(worker.engine, ends).serve(sockets.engine))
    reader, writer = await opened(sockets.trainer)
    while (body := await read_frame(reader)) is not None:
        writer.write(framed(await handler.answer(decode_call(body))))
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


def main() -> int:
    config = RunConfig.model_validate_json(sys.stdin.buffer.readline())
    exit_with_stdin()  # before the ranks have met there is no connection to watch, but there is the pipe
    info = RankInfo.found()
    assert info is not None
    try:
        follow(config, info)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
