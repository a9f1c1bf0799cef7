"""Finds the rank of this process and the world size, and starts and connects the other ranks.

A connection is opened with a token that only the ranks know.
"""

import hmac
import os
import signal
import socket
import struct
import subprocess
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.observe.monitor import RunDirectory
from paceline.orchestrator import Checkpoints
from paceline.util.child_process import end_child, free_port, start_child

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This process's rank, and where the process group is formed."""

    rank: int
    world: int
    host: str
    port: int
    local_world_size: int
    """Ranks on this machine, this one included: they share its cores."""
    by_torchrun: bool
    """Whether another launcher, such as torchrun, has started the ranks."""

    @classmethod
    def from_torchrun_env(cls) -> "RankInfo | None":
        """Read from the environment variables that torchrun sets; None if they are not set."""
        if not all(os.environ.get(name) for name in TORCHRUN_VARIABLES):
            return None

        def number(name: str) -> int:
            if not (value := os.environ[name]).isdecimal():
                raise PacelineError(f"{name} is `{value}`, not a number: start the ranks with torchrun")
            return int(value)

        host, port, world = os.environ["MASTER_ADDR"], number("MASTER_PORT"), number("WORLD_SIZE")
        local_world_size = number("LOCAL_WORLD_SIZE") if os.environ.get("LOCAL_WORLD_SIZE") else world
        return cls(number("RANK"), world, host, port, local_world_size, by_torchrun=True)

    @classmethod
    def self_launched(cls, world: int) -> "RankInfo":
        """The first rank of a run that starts the others itself, on this machine."""
        return cls(0, world, LOOPBACK, free_port(LOOPBACK), world, by_torchrun=False)

    @property
    def rendezvous_address(self) -> str | None:
        """`host:port` of the process group's store; None where torchrun's variables name it."""
        return None if self.by_torchrun else f"{self.host}:{self.port}"

    def variables(self, rank: int) -> dict[str, str]:
        """The environment variables that torchrun would set for a rank."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


CLOSE_SECONDS = 20.0
WORD_SECONDS = 2.0


@dataclass(slots=True)
class RankProcesses:
    """The processes of ranks 1 and up, by rank; none where torchrun started them."""

    live: Path
    """The folder of their logs."""
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @classmethod
    def start(cls, config: RunConfig, info: RankInfo, live: Path) -> "RankProcesses":
        started, line = cls(live), config.model_dump_json().encode() + b"\n"
        try:
            for rank in range(1, 1 if info.by_torchrun else info.world):
                env = {**os.environ, **info.variables(rank)}
                with (live / f"rank-{rank}.log").open("wb") as log:
                    module = "paceline.runtime.colocated.place"
                    started.processes[rank] = start_child(module, line=line, env=env, stdout=log, stderr=log)
        except BaseException:
            started.end(0.0)
            raise
        return started

    def dead(self) -> int | None:
        """A rank whose process has ended."""
        return next((rank for rank, process in self.processes.items() if process.poll() is not None), None)

    def cause(self, rank: int) -> str:
        """Why a rank is gone, as the end of a sentence."""
        process, log = self.processes.get(rank), self.live / f"rank-{rank}.log"
        if process is None:
            return "its connection was closed"
        try:
            code = process.wait(WORD_SECONDS)
        except subprocess.TimeoutExpired:
            return f"its connection was closed (see {log})"
        if code < 0:
            return f"it was killed by {signal.Signals(-code).name}"
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        words = lines[-1].strip().removeprefix("paceline: ") if lines else "it said nothing"
        return f"it ended with code {code}: {words} (all of it is in {log})"

    def end(self, seconds: float = CLOSE_SECONDS) -> None:
        """Give them time to end by themselves, then end them."""
        deadline = time.monotonic() + seconds
        for process in self.processes.values():  # killed, for it leaves signals to rank 0, which is what says so here
            end_child(process, max(0.0, deadline - time.monotonic()), CLOSE_SECONDS)


def find_rank(config: RunConfig) -> tuple[RunConfig, RankInfo]:
    """The rank of this process, and the run file with as many ranks as there are."""
    info, ranks = RankInfo.from_torchrun_env(), config.trainer.parallel.ranks
    if info is None:
        return config, RankInfo.self_launched(ranks)
    if info.world == ranks:
        return config, info
    if "ranks" in config.trainer.parallel.model_fields_set:
        raise PacelineError(
            f"torchrun started {info.world} processes, but trainer.parallel.ranks = {ranks}: start {ranks}, or "
            "leave trainer.parallel.ranks out of the run file"
        )
    table = config.model_dump(mode="json", exclude_none=True)
    table["trainer"]["parallel"]["ranks"] = info.world
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were heard when the file was read
            return RunConfig.model_validate(table), info
    except ValidationError as error:
        causes = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
        raise PacelineError(f"torchrun started {info.world} processes: {causes}") from None


def without_first_resume(config: RunConfig) -> RunConfig:
    """Drop `--resume latest` from the first start under a torchrun that restarts lost ranks: there is no checkpoint."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    directory = RunDirectory(Path(config.runs) / config.name)
    if config.resume != "latest" or restarts == "0" or Checkpoints(directory.checkpoints, 1).all():
        return config
    return config.model_copy(update={"resume": None})


def refuse_torchrun(config: RunConfig) -> None:
    """Several processes of one torchrun must not each lead a run of their own."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise PacelineError(
            f'torchrun started {os.environ["WORLD_SIZE"]} processes, but placement = "{config.placement}" needs one, '
            'which starts the others: set placement = "colocated", or use plain `paceline train`'
        )


TOKEN_BYTES = 32
GREETING = struct.Struct(f"<{TOKEN_BYTES}sII")
"""The first message: the token, the rank, and what the connection is for."""
GREETING_SECONDS = 10.0
MEET_SECONDS = 600.0
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""A machine that is gone without a word is missed after a minute and a half."""


class RankSockets(NamedTuple):
    """The three connections between rank 0 and another rank."""

    trainer: socket.socket
    engine: socket.socket
    life: socket.socket
    """Nothing is said here; it is closed when rank 0 is gone."""

    def close(self) -> None:
        for sock in self:
            sock.close()


def open_listener(host: str) -> socket.socket:
    """A listening socket for the other ranks: at `host`, which is this machine, or on all interfaces if it is empty. A
    machine may know its own name as a loopback address, at which other machines do not find it."""
    try:
        if host:
            return socket.create_server((host, 0), family=socket.getaddrinfo(host, None)[0][0])
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", 0))
    except OSError as error:
        raise PacelineError(
            f"rank 0 cannot listen at {host} ({error}): MASTER_ADDR must be an address of its machine"
        ) from error


def accept_ranks(listener: socket.socket, world: int, token: bytes) -> list[RankSockets]:
    """Wait until all other ranks have connected. A connection without the token is closed."""
    found: dict[tuple[int, str], socket.socket] = {}
    deadline = time.monotonic() + MEET_SECONDS
    while len(found) < (world - 1) * len(RankSockets._fields):
        listener.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            sock, _ = listener.accept()  # bounded: by the deadline
        except (TimeoutError, BlockingIOError):
            raise PacelineError(f"the other ranks did not come within {MEET_SECONDS:g} s") from None
        if (known := _read_greeting(sock, token, world)) is None or known in found:
            sock.close()
        else:
            found[known] = _keep_alive(sock)
    return [RankSockets(*(found[rank, purpose] for purpose in RankSockets._fields)) for rank in range(1, world)]


def connect_to_rank_0(info: RankInfo, port: int, token: bytes) -> RankSockets:
    opened = []
    for purpose in range(len(RankSockets._fields)):
        try:
            sock = socket.create_connection((info.host, port), GREETING_SECONDS)
        except OSError as error:
            raise PacelineError(f"rank {info.rank} cannot reach rank 0 at {info.host}:{port}: {error}") from error
        sock.sendall(GREETING.pack(token, info.rank, purpose))
        opened.append(_keep_alive(sock))
    return RankSockets(*opened)


def _read_greeting(sock: socket.socket, token: bytes, world: int) -> tuple[int, str] | None:
    sock.settimeout(GREETING_SECONDS)
    try:
        data = sock.recv(GREETING.size, socket.MSG_WAITALL)  # bounded: by GREETING_SECONDS
        claimed, rank, purpose = GREETING.unpack(data)
    except (OSError, struct.error):
        return None
    if not hmac.compare_digest(claimed, token) or not 0 < rank < world or purpose >= len(RankSockets._fields):
        return None
    return rank, RankSockets._fields[purpose]


def _keep_alive(sock: socket.socket) -> socket.socket:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock
