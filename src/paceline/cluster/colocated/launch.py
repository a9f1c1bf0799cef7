"""Starts the other ranks on this machine, where torchrun has not."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cluster.colocated.seat import Seat
from paceline.config import RunConfig

CLOSE_SECONDS = 20.0
WORD_SECONDS = 2.0


@dataclass(slots=True)
class Followers:
    """The processes of ranks 1 and up, by rank; none where torchrun started them."""

    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    logs: dict[int, Path] = field(default_factory=dict)

    @classmethod
    def start(cls, config: RunConfig, seat: Seat, live: Path) -> "Followers":
        """Each in a session of its own: a Ctrl-C is for rank 0 to hear."""
        started = cls()
        try:
            for rank in range(1, seat.world):
                path = started.logs[rank] = live / f"rank-{rank}.log"
                with path.open("wb") as log:
                    process = subprocess.Popen(
                        [sys.executable, "-P", "-m", "paceline.cluster.colocated.follower"],
                        env={**os.environ, **seat.of(rank).variables},
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                started.processes[rank] = process
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # dead already: whoever looks next will see it
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
