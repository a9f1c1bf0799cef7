"""Starts, connects and ends the ranks of a `colocated` run: rank 0, the orchestrator's side."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

from paceline.clients.rpc import HEAD, opened, read_frame
from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.model import end_tokens, load_tokenizer, quick_handover, small_products
from paceline.observe.monitor import Monitor, RunDirectory, RunOutcome
from paceline.orchestrator import build_train_envs
from paceline.runtime.colocated.rank_info import RankInfo, again, find_rank
from paceline.runtime.colocated.rank_sockets import RankSockets, accept_ranks, listening, send_address
from paceline.runtime.colocated.worker import (
    END,
    ColocatedLink,
    ColocatedRpcHandler,
    ColocatedWorker,
    HeldTensors,
    build_worker,
    follow,
    meet,
)
from paceline.runtime.local import Placed, make_room_for_adapters, past_versions, policy_clients, pool_of
from paceline.runtime.processes.launch_spec import start_child
from paceline.runtime.rpc import RankGroup, RpcCall, RpcFailure, RpcResult, decode_answer, framed
from paceline.runtime.session import Given, RunResult, run_session
from paceline.runtime.signals import Signals
from paceline.runtime.torch_backend import league_engine
from paceline.trainer import TrainerError
from paceline.trainer.batch import cost_of
from paceline.trainer.torch.world import call_off, leave
from paceline.util.process_exit import end_child
from paceline.weights.update import WeightUpdate

CLOSE_SECONDS = 20.0
WORD_SECONDS = 2.0


@dataclass(slots=True)
class RankProcesses:
    """The processes of ranks 1 and up, by rank; none where torchrun started them."""

    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    logs: dict[int, Path] = field(default_factory=dict)

    @classmethod
    def start(cls, config: RunConfig, info: RankInfo, live: Path) -> "RankProcesses":
        started = cls()
        try:
            for rank in range(1, info.world):
                path = started.logs[rank] = live / f"rank-{rank}.log"
                with path.open("wb") as log:
                    started.processes[rank] = start_child(
                        "paceline.runtime.colocated.worker",
                        line=config.model_dump_json().encode() + b"\n",
                        env={**os.environ, **info.of(rank).variables},
                        stdout=log,
                        stderr=log,
                    )
        except BaseException:
            started.end(0.0)
            raise
        return started

    def dead(self) -> int | None:
        """A rank whose process has ended."""
        return next((rank for rank, process in self.processes.items() if process.poll() is not None), None)

    def cause(self, rank: int) -> str:
        """Why a rank is gone, as the end of a sentence."""
        process = self.processes.get(rank)
        if process is None:
            return "its connection was closed"
        try:
            code = process.wait(WORD_SECONDS)
        except subprocess.TimeoutExpired:
            return f"its connection was closed (see {self.logs[rank]})"
        if code < 0:
            return f"it was killed by {signal.Signals(-code).name}"
        lines = [line for line in self.logs[rank].read_text(errors="replace").splitlines() if line.strip()]
        words = lines[-1].strip().removeprefix("paceline: ") if lines else "it said nothing"
        return f"it ended with code {code}: {words} (all of it is in {self.logs[rank]})"

    def end(self, seconds: float = CLOSE_SECONDS) -> None:
        """Give them time to end by themselves, then end them."""
        deadline = time.monotonic() + seconds
        for process in self.processes.values():  # killed, for it leaves signals to rank 0, which is what says so here
            end_child(process, max(0.0, deadline - time.monotonic()), CLOSE_SECONDS)


LOOK_SECONDS = 0.2
T = TypeVar("T")


class RankLink:
    """Asks another rank, one thing at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, call: RpcCall) -> RpcResult | RpcFailure:
        self._streams = reader, writer = self._streams or await opened(self._sock)
        writer.write(framed(call))
        if (body := await read_frame(reader)) is None:
            raise ConnectionError  # the rank is gone
        answer = decode_answer(body)
        assert isinstance(answer, RpcResult | RpcFailure)
        return answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._sock.close()


class ColocatedTrainer(RankGroup):
    """The rank of this process and all others as one trainer. They share this process's fate, so a lost one ends the
    run."""

    def __init__(
        self, config: RunConfig, handler: ColocatedRpcHandler, others: Sequence[RankLink], why: Callable[[int], str]
    ) -> None:
        super().__init__(config)
        self._handler, self._others, self._why = handler, others, why
        self._cost = cost_of(handler.worker.model.config)
        self.broken = False
        """Whether the ranks can no longer be asked: some may wait for others for ever."""

    async def weights(self) -> WeightUpdate:
        """All engines hold them when this answers: the update only says which they are."""
        sent = [done.sent for done in await self._call("weights")]
        marks = [(each.version, each.expected) for each in sent if each is not None]
        if len(set(marks)) != 1:
            raise TrainerError(f"the ranks hold different weights, as version and fingerprint say: {marks}")
        update = self._handler.worker.update
        assert update is not None
        return replace(update, tensors=HeldTensors(update.tensors))

    def close(self) -> None:
        """The other ranks end: rank 0 says nothing more to them."""
        self.broken = True
        for link in self._others:
            link.close()

    @property
    def _size(self) -> int:
        return 1 + len(self._others)

    async def _ask(self, rank: int, call: RpcCall) -> RpcResult | RpcFailure:
        if rank == 0:
            return await self._handler.answer(call)
        return await self._others[rank - 1].ask(call)

    def _there(self) -> None:
        if self.broken:
            raise TrainerError("the other ranks have ended: add --resume latest")

    def _gone(self, rank: int, error: BaseException) -> BaseException | None:
        if not isinstance(error, ConnectionError):
            return None
        return TrainerError(f"rank {rank} of {self._size} is lost: {self._why(rank)}; go on with --resume latest")


@asynccontextmanager
async def in_place(
    info: RankInfo, config: RunConfig, dumps: Path, phase: Callable[[str], None], given: Any
) -> AsyncGenerator[Placed]:
    """Meet the other ranks, load the model on all of them, and end them with the run."""
    async with AsyncExitStack() as stack:
        phase("preparing environments")
        courses = build_train_envs(config, given)
        tokenizer = load_tokenizer(config.model)
        past = past_versions(courses)
        config = make_room_for_adapters(config, past)
        config = config.model_copy(update={"runs": str(Path(config.runs).resolve())})
        live = RunDirectory(dumps.parent).live
        live.mkdir(parents=True, exist_ok=True)
        processes = RankProcesses() if info.given else RankProcesses.start(config, info, live)
        stack.callback(processes.end)

        phase(f"loading {config.model.name} on {info.world} ranks")
        worker, sockets = await _unless_dead(processes, lambda: _gather(info, config, dumps))
        handler = ColocatedRpcHandler(worker, tokenizer, live / "rank-0.log")
        trainer = ColocatedTrainer(config, handler, [RankLink(other.trainer) for other in sockets], processes.cause)
        stack.callback(_part, trainer, worker, sockets)
        links = [ColocatedLink(other.engine) for other in sockets]
        for link in links:
            await _unless_dead(processes, link.start)
            stack.callback(link.close)
        pool = pool_of([worker.engine, *links], past, lambda: league_engine(config))
        stack.callback(pool.close)
        voice = policy_clients(config, pool, tokenizer, end_tokens(tokenizer, worker.model))
        stack.callback(_ignore_sigterm, info)
        with small_products(worker.model.dtype), quick_handover(worker.device):
            yield Placed(pool, trainer, tokenizer, courses, voice, worker.device, worker.parameters)


def _gather(info: RankInfo, config: RunConfig, dumps: Path) -> tuple[ColocatedWorker, list[RankSockets]]:
    """All of it on one thread, for a thread is what a GPU is chosen for."""
    sockets: list[RankSockets] = []
    group = meet(info, config)
    try:
        if group is not None:
            with listening(info.host if info.neighbours == info.world else "") as sock:
                sockets = accept_ranks(sock, info.world, send_address(group, sock))
        text = config.model_dump_json().encode()
        for other in sockets:
            other.trainer.sendall(HEAD.pack(len(text)) + text)
        return build_worker(config, info, group, dumps), sockets
    except BaseException:
        for other in sockets:
            other.close()
        raise


async def _unless_dead(processes: RankProcesses, work: Callable[[], T]) -> T:
    """Do something that waits for other ranks, unless one of them dies first. Then the thread that does it is left
    behind: it would wait as long as a slow rank may take."""
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


def _ignore_sigterm(info: RankInfo) -> None:
    """A torchrun that has lost a rank ends all others: this one is about to, and has a sentence to say first."""
    if info.given and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _part(trainer: ColocatedTrainer, worker: ColocatedWorker, sockets: Sequence[RankSockets]) -> None:
    """A run that ends in good order says so, and the others end too; after a failure they are gone, or are left to end
    by themselves, and what this rank still waits for from them is called off."""
    broken = trainer.broken
    for other in sockets:
        if not broken:
            with contextlib.suppress(OSError):
                other.life.sendall(END)
    trainer.close()
    for other in sockets:
        other.close()
    if broken:
        call_off()
    worker.close()
    leave()


def colocated(
    config: RunConfig,
    environments: Given,
    overwrite: bool,
    screen: TextIO | Monitor | None,
    signals: Signals | None = None,
) -> RunResult:
    """Rank 0 leads the run and answers with all of it; every other rank answers, when it is over, with nothing."""
    config, info = find_rank(config)
    if info.rank == 0:
        return run_session(again(config), partial(in_place, info), environments, overwrite, screen, signals)
    follow(config, info)
    return RunResult(RunOutcome("finished", 0, ""), Path(config.runs) / config.name, [], [])
