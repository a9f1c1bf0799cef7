"""Connects rank 0 to every other rank by three sockets, opened with a token that only the ranks know."""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.runtime.colocated.rank_info import RankInfo

PURPOSES = ("trainer", "engine", "life")
TOKEN_BYTES = 32
GREETING = struct.Struct(f"<{TOKEN_BYTES}sII")
"""The first message: the token, the rank, and what the connection is for."""
GREETING_SECONDS = 10.0
MEET_SECONDS = 600.0
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""A machine that is gone without a word is missed after a minute and a half."""


@dataclass(frozen=True, slots=True)
class RankSockets:
    """The three connections between rank 0 and another rank."""

    trainer: socket.socket
    engine: socket.socket
    life: socket.socket
    """Nothing is said here; it is closed when rank 0 is gone."""

    def close(self) -> None:
        for sock in (self.trainer, self.engine, self.life):
            sock.close()


@contextmanager
def listening(host: str) -> Generator[socket.socket]:
    """A listening socket for the other ranks: at `host`, which is this machine, or on all interfaces if it is empty. A
    machine may know its own name as a loopback address, at which other machines do not find it."""
    try:
        if host:
            sock = socket.create_server((host, 0), family=socket.getaddrinfo(host, None)[0][0])
        elif socket.has_dualstack_ipv6():
            sock = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            sock = socket.create_server(("", 0))
    except OSError as error:
        raise PacelineError(
            f"rank 0 cannot listen at {host} ({error}): MASTER_ADDR must be an address of its machine"
        ) from error
    with sock:
        yield sock


def send_address(group: dist.ProcessGroup, sock: socket.socket) -> bytes:
    """Give all ranks the port and a token of this run's own; answers with the token."""
    token = secrets.token_bytes(TOKEN_BYTES)
    dist.broadcast(torch.tensor([sock.getsockname()[1], *token]), src=0, group=group)
    return token


def receive_address(group: dist.ProcessGroup) -> tuple[int, bytes]:
    """Receive the port and the token from rank 0."""
    data = torch.zeros(1 + TOKEN_BYTES, dtype=torch.int64)
    dist.broadcast(data, src=0, group=group)
    port, *token = data.tolist()
    return port, bytes(token)


def accept_ranks(listener: socket.socket, world: int, token: bytes) -> list[RankSockets]:
    """Wait until all other ranks have connected. A connection without the token is closed."""
    found: dict[tuple[int, str], socket.socket] = {}
    deadline = time.monotonic() + MEET_SECONDS
    while len(found) < (world - 1) * len(PURPOSES):
        listener.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            sock, _ = listener.accept()  # bounded: by the deadline
        except (TimeoutError, BlockingIOError):
            raise PacelineError(f"the other ranks did not come within {MEET_SECONDS:g} s") from None
        if (known := _read_greeting(sock, token, world)) is None or known in found:
            sock.close()
        else:
            found[known] = _keep_alive(sock)
    return [RankSockets(*(found[rank, purpose] for purpose in PURPOSES)) for rank in range(1, world)]


def connect_to_rank_0(info: RankInfo, port: int, token: bytes) -> RankSockets:
    """Open the three connections to rank 0."""
    opened = []
    for purpose in range(len(PURPOSES)):
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
    except OSError:
        return None
    if len(data) != GREETING.size:
        return None
    claimed, rank, purpose = GREETING.unpack(data)
    if not hmac.compare_digest(claimed, token) or not 0 < rank < world or purpose >= len(PURPOSES):
        return None
    return rank, PURPOSES[purpose]


def _keep_alive(sock: socket.socket) -> socket.socket:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock
