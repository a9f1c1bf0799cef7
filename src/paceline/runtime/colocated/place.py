"""Starts, connects and ends the ranks of a `colocated` run: rank 0, the orchestrator's side.

Leads a `colocated` run on rank 0, and takes part in it on every other rank.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

from paceline.clients import Pool
from paceline.clients.frames import HEAD, opened, read_frame
from paceline.clients.pool import LeaguePool
from paceline.config import RunConfig
from paceline.config.inference import SamplingConfig
from paceline.engine import EmbeddedEngine
from paceline.errors import PacelineError
from paceline.model import end_tokens, load_model, load_tokenizer, quick_handover, small_products
from paceline.observe.monitor import Monitor, RunDirectory, RunOutcome
from paceline.orchestrator import lay_out
from paceline.orchestrator.league_checkpoints import members
from paceline.rollout import RecordingServer, SamplingClient
from paceline.runtime.colocated.rank_info import RankInfo, again, take_seat
from paceline.runtime.colocated.rank_sockets import Doors, admit, listening, tell
from paceline.runtime.colocated.worker import (
    END,
    ColocatedRpcHandler,
    ColocatedWorker,
    HomeLink,
    InPlace,
    follow,
    meet,
    move_in,
)
from paceline.runtime.local import Placed, make_room_for_adapters, renderer_of
from paceline.runtime.processes.frames import RpcCall, RpcFailure, RpcResult, decode_answer, framed
from paceline.runtime.rank_group import RankGroup, cost_of
from paceline.runtime.session import Given, RunResult, conduct
from paceline.runtime.signals import Signals
from paceline.runtime.torch_kit import engine_for, pick_device
from paceline.trainer import TrainerError
from paceline.trainer.torch.world import call_off, leave
from paceline.weights.update import WeightUpdate

CLOSE_SECONDS = 20.0
WORD_SECONDS = 2.0


@dataclass(slots=True)
class Followers:
    """The processes of ranks 1 and up, by rank; none where torchrun started them."""

    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    logs: dict[int, Path] = field(default_factory=dict)

    @classmethod
    def start(cls, config: RunConfig, seat: RankInfo, live: Path) -> "Followers":
        """Each in a session of its own: a Ctrl-C is for rank 0 to hear."""
        started = cls()
        try:
            for rank in range(1, seat.world):
                path = started.logs[rank] = live / f"rank-{rank}.log"
                with path.open("wb") as log:
                    process = subprocess.Popen(
                        [sys.executable, "-P", "-m", "paceline.runtime.colocated.worker"],
                        env={**os.environ, **seat.of(rank).variables},
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                started.processes[rank] = process
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # dead already: the next poll will see it
                    process.stdin.write(config.model_dump_json().encode() + b"\n")
                    process.stdin.flush()
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
        said = lines[-1].strip().removeprefix("paceline: ") if lines else "it said nothing"
        return f"it ended with code {code}: {said} (all of it is in {self.logs[rank]})"

    def end(self, seconds: float = CLOSE_SECONDS) -> None:
        """Give them time to end by themselves, then end them."""
        deadline = time.monotonic() + seconds
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()  # it leaves signals to rank 0, which is what says so here
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(CLOSE_SECONDS)
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()


LOOK_SECONDS = 0.2
T = TypeVar("T")


class RankGone(ConnectionError):
    """A rank's connection has ended."""


class RankLink:
    """Asks another rank, one thing at a time."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, call: RpcCall) -> RpcResult | RpcFailure:
        self._streams = reader, writer = self._streams or await opened(self._door)
        writer.write(framed(call))
        if (body := await read_frame(reader)) is None:
            raise RankGone
        answer = decode_answer(body)
        assert isinstance(answer, RpcResult | RpcFailure)
        return answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._door.close()


class ColocatedTrainer(RankGroup):
    """The rank of this process and all others as one trainer. They share this process's fate, so a lost one ends the
    run."""

    def __init__(
        self,
        config: RunConfig,
        resident: ColocatedWorker,
        desk: ColocatedRpcHandler,
        others: Sequence[RankLink],
        why: Callable[[int], str],
    ) -> None:
        super().__init__(config)
        self._resident, self._desk, self._others, self._why = resident, desk, list(others), why
        self._cost = cost_of(resident.model.config)
        self.broken = False
        """Whether the ranks can no longer be asked: some may wait for others for ever."""

    async def weights(self) -> WeightUpdate:
        """All engines hold them when this answers: the update only says which they are."""
        sent = [done.sent for done in await self._call("weights")]
        marks = [(each.version, each.expected) for each in sent if each is not None]
        if len(set(marks)) != 1:
            raise TrainerError(f"the ranks hold different weights, as version and fingerprint say: {marks}")
        update = self._resident.update
        assert update is not None
        return replace(update, tensors=InPlace(update.tensors))

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
            return await self._desk.answer(call)
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
    seat: RankInfo, config: RunConfig, dumps: Path, phase: Callable[[str], None], given: Any
) -> AsyncGenerator[Placed]:
    """Meet the other ranks, load the model on all of them, and end them with the run."""
    async with AsyncExitStack() as stack:
        phase("preparing environments")
        courses = lay_out(config, given)
        tokenizer = load_tokenizer(config.model)
        past = sum(member.league.size for member in members(courses))
        config = make_room_for_adapters(config, past)
        config = config.model_copy(update={"runs": str(Path(config.runs).resolve())})
        live = RunDirectory(dumps.parent).live
        live.mkdir(parents=True, exist_ok=True)
        followers = Followers()
        if not seat.given:
            followers = Followers.start(config, seat, live)
        stack.callback(followers.end)

        phase(f"loading {config.model.name} on {seat.world} ranks")
        resident, doors = await _beside(followers, lambda: _gather(seat, config, dumps))
        desk = ColocatedRpcHandler(resident, tokenizer, live / "rank-0.log")
        trainer = ColocatedTrainer(
            config, resident, desk, [RankLink(other.trainer) for other in doors], followers.cause
        )
        stack.callback(_part, trainer, resident, doors)
        links = [HomeLink(other.engine) for other in doors]
        for link in links:
            await _beside(followers, link.start)
            stack.callback(link.close)

        def twin() -> EmbeddedEngine:
            """An engine of this process, for a past version that is a whole model."""
            model = load_model(config.model, pick_device(config.device))
            return engine_for(model.requires_grad_(False), config)

        engines = [resident.engine, *links]
        with_past = LeaguePool(engines, twin) if past else None
        pool = with_past or Pool(engines)
        stack.callback(pool.close)
        ends = end_tokens(tokenizer, resident.model)
        renderer = renderer_of(tokenizer, ends, config.model)
        recorder = RecordingServer(config.recording.host, config.recording.port, config.recording.advertise)

        def voice(sampling: SamplingConfig) -> SamplingClient:
            return SamplingClient(pool, renderer, sampling, frozenset((*ends, *sampling.stop_token_ids)), recorder)

        stack.callback(_hear_no_more, seat)
        with small_products(resident.model.dtype), quick_handover(resident.device):
            yield Placed(pool, trainer, tokenizer, courses, voice, resident.device, resident.parameters, with_past)


def _gather(seat: RankInfo, config: RunConfig, dumps: Path) -> tuple[ColocatedWorker, list[Doors]]:
    """All of it on one thread, for a thread is what a GPU is chosen for."""
    doors: list[Doors] = []
    group = meet(seat, config)
    try:
        if group is not None:
            with listening(seat.host if seat.neighbours == seat.world else "") as door:
                doors = admit(door, seat.world, tell(group, door))
        text = config.model_dump_json().encode()
        for other in doors:
            other.trainer.sendall(HEAD.pack(len(text)) + text)
        return move_in(config, seat, group, dumps), doors
    except BaseException:
        for other in doors:
            other.close()
        raise


async def _beside(followers: Followers, work: Callable[[], T]) -> T:
    """Do something that waits for other ranks, unless one of them dies first. Then the thread that does it is left
    behind: it would wait as long as a slow rank may take."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)  # ty: ignore[invalid-argument-type] - without an error it is there
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as failure:
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop is closed: the caller waits no more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="meeting the ranks", daemon=True).start()
    while not (await asyncio.wait([done], timeout=LOOK_SECONDS))[0]:
        if followers.dead() is not None:
            break
    if (rank := followers.dead()) is not None:  # what this rank says of it is an echo: the cause is over there
        done.cancel()
        raise PacelineError(f"rank {rank} did not come up: {followers.cause(rank)}")
    return done.result()  # bounded: it is done


def _hear_no_more(seat: RankInfo) -> None:
    """A torchrun that has lost a rank ends all others: this one is about to, and has a sentence to say first."""
    if seat.given and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _part(trainer: ColocatedTrainer, resident: ColocatedWorker, doors: Sequence[Doors]) -> None:
    """A run that ends in good order says so, and the others end too; after a failure they are gone, or are left to end
    by themselves, and what this rank still waits for from them is called off."""
    broken = trainer.broken
    for other in doors:
        if not broken:
            with contextlib.suppress(OSError):
                other.life.sendall(END)
    trainer.close()
    for other in doors:
        other.close()
    if broken:
        call_off()
    resident.close()
    leave()


def colocated(
    config: RunConfig,
    environments: Given,
    overwrite: bool,
    screen: TextIO | Monitor | None,
    signals: Signals | None = None,
) -> RunResult:
    """Rank 0 leads the run and answers with all of it; every other rank answers, when it is over, with nothing."""
    config, seat = take_seat(config)
    if seat.rank == 0:
        place = partial(in_place, seat)
        return conduct(
            again(config), place, environments=environments, overwrite=overwrite, screen=screen, signals=signals
        )
    follow(config, seat)
    return RunResult(RunOutcome("finished", 0, ""), Path(config.runs) / config.name, [], [])
