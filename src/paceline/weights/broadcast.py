"""Full weights by a collective: one process sends, any number receive, bucket by bucket.

A group is the sender (rank 0) and its receivers, and has nothing to do with torch's own default group: a process may be
in several. They meet at a TCP store of the sender's. The update is one row of bytes, each tensor at a multiple of 64;
a bucket is a stretch of that row. Receivers stage all of it, and only then give it to their engine, which applies it
between two tokens. Every wait has a bound: a member that is lost costs the others no more than `seconds`.

    sender   = Sender(members=2);            receiver = Receiver(address, port, world=3, rank=1)
    sender.form()                            receiver.form()                      (at the same time)
    sender.send(tensors)                     tensors = receiver.receive(layout)   (at the same time)
"""

import socket
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import EngineError, first_line
from paceline.weights.delta import DTYPES

TIMEOUT_SECONDS = 120.0
"""For a group to form, and for one bucket to arrive."""
CONNECT_SECONDS = 10.0
"""For a receiver to reach the sender, which listens before it invites receivers."""
BUCKET_BYTES = 64 << 20
ALIGN = 64


class TensorSlot(NamedTuple):
    """A tensor in the row of bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def layout_of(tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Names, types and shapes, in order: what receivers must know before the bytes come."""
    return [
        {"name": name, "dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
        for name, t in tensors.items()
    ]


def byte_layout(layout: Sequence[Mapping[str, Any]]) -> tuple[list[TensorSlot], int]:
    """Where each tensor lies in the row, and the row's length in bytes."""
    places: list[TensorSlot] = []
    end = 0
    for entry in layout:
        dtype, shape, start = DTYPES[entry["dtype"]], tuple(entry["shape"]), -(-end // ALIGN) * ALIGN
        end = start + prod(shape) * dtype.itemsize
        places.append(TensorSlot(entry["name"], dtype, shape, start, end))
    return places, end


class BroadcastGroup:
    """Rank `rank` of `world` processes."""

    def __init__(self, world: int, rank: int, device: torch.device | str, seconds: float, bucket: int) -> None:
        self.world, self.rank, self.seconds, self.bucket = world, rank, seconds, bucket
        self.device = torch.device(device)
        self._store: dist.Store | None = None
        self._group: Any = None

    def close(self) -> None:
        """Leave; the others notice at their next bucket."""
        group, self._group, self._store = self._group, None, None
        if group is not None and hasattr(group, "abort"):
            group.abort()

    def _join(self, store: dist.Store) -> None:
        """Wait for the others, and connect to each."""
        limit = timedelta(seconds=self.seconds)
        store.set_timeout(limit)
        with self._close_on_failure(f"the group of {self.world} for weights did not form"):
            if self.device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = limit
                self._group = dist.ProcessGroupNCCL(store, self.rank, self.world, options)
            else:
                self._group = dist.ProcessGroupGloo(store, self.rank, self.world, limit)
            self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))  # connected, and not only promised

    def _broadcast(self, part: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([part], options).wait(timedelta(seconds=self.seconds))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _broadcast_or_close(self, part: Tensor) -> None:
        if self._group is None:
            raise EngineError("there is no group to broadcast weights in: it must be formed first")
        with self._close_on_failure("a member of the group for weights is gone"):
            self._broadcast(part)

    @contextmanager
    def _close_on_failure(self, failure: str) -> Generator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            self.close()
            raise EngineError(f"{failure}: {first_line(error)}") from error


class Sender(BroadcastGroup):
    """Rank 0: the process that has the weights."""

    def __init__(
        self, members: int, device: torch.device | str = "cpu", seconds: float = TIMEOUT_SECONDS,
        bucket: int = BUCKET_BYTES, host: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        super().__init__(members + 1, 0, device, seconds, bucket)
        self._host = host
        listening = socket.create_server((host, 0))
        self._port = listening.getsockname()[1]
        limit, fd = timedelta(seconds=seconds), listening.detach()
        self._store = dist.TCPStore(host, self._port, None, True, limit, wait_for_workers=False, master_listen_fd=fd)

    def invitation(self, rank: int) -> dict[str, Any]:
        """The invitation of receiver `rank`, as `POST /weights/group` takes it."""
        where: dict[str, Any] = {"address": self._host, "port": self._port, "world": self.world, "rank": rank}
        return where | {"seconds": self.seconds, "bucket": self.bucket}

    def form(self) -> None:
        """Wait until all receivers have come."""
        assert self._store is not None
        self._join(self._store)

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send all tensors; returns when the last bucket has left."""
        places, size = byte_layout(layout_of(tensors))
        buffer = torch.empty(min(self.bucket, max(1, size)), dtype=torch.uint8, device=self.device)
        for start in range(0, size, self.bucket):
            end = min(size, start + self.bucket)
            for place in places:
                low, high = max(start, place.start), min(end, place.end)
                if low < high:  # what of it lies in this bucket
                    raw = tensors[place.name].detach().contiguous().view(-1).view(torch.uint8)
                    buffer[low - start : high - start].copy_(raw[low - place.start : high - place.start])
            self._broadcast_or_close(buffer[: end - start])


class Receiver(BroadcastGroup):
    """Any other rank: a process that has an engine."""

    def __init__(
        self, address: str, port: int, world: int, rank: int, device: torch.device | str = "cpu",
        seconds: float = TIMEOUT_SECONDS, bucket: int = BUCKET_BYTES,
    ) -> None:  # fmt: skip
        super().__init__(world, rank, device, seconds, bucket)
        self._address = address, port
        self._staging: Tensor | None = None

    def form(self) -> None:
        """Find the sender and the others."""
        limit = timedelta(seconds=min(self.seconds, CONNECT_SECONDS))
        address, port = self._address
        with self._close_on_failure(f"no sender listens at {address} port {port}"):
            self._store = dist.TCPStore(address, port, None, False, limit)
        self._join(self._store)

    def receive(self, layout: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The tensors of one update, in a buffer of the host that the next one overwrites. A GPU holds a bucket of them
        on the way: it has no room for all weights twice."""
        places, size = byte_layout(layout)
        if self._staging is None or len(self._staging) != size:
            self._staging = None  # two of them need not be there at once
            self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
        via_device = self.device.type != "cpu"
        device_bucket = torch.empty(min(self.bucket, size) if via_device else 0, dtype=torch.uint8, device=self.device)
        for start in range(0, size, self.bucket):
            part = self._staging[start : start + self.bucket]
            received = device_bucket[: len(part)] if via_device else part
            self._broadcast_or_close(received)
            if via_device:
                part.copy_(received)
        return {p.name: self._staging[p.start : p.end].view(p.dtype).view(p.shape) for p in places}
