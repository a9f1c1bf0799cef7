"""Entry point of every rank but the first: trains and samples as rank 0 says, and ends with it.

python -m paceline.cluster.colocated.follower      the run file as JSON on standard input, a seat in the variables
"""

import asyncio
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from paceline.cluster.colocated.rank_info import RankInfo
from paceline.cluster.colocated.rank_sockets import Doors, knock, told
from paceline.cluster.colocated.worker import ColocatedRpcHandler, ColocatedWorker, meet, move_in
from paceline.cluster.processes.frames import decode_call, framed
from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.inference.frames import EngineHello, FromEngine, frame, opened, read_frame
from paceline.inference.host import EngineHost
from paceline.inference.link import received
from paceline.model import end_tokens, load_tokenizer, quick_handover, small_products
from paceline.trainer.init_distributed import leave

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
