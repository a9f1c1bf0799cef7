"""The process group of all ranks: joins and leaves it, and sums over it."""

import contextlib
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.config.cluster import ParallelConfig
from paceline.data import Sample, decode, encode
from paceline.errors import TrainerError

SECONDS = 600.0
"""Until all ranks are there; and how long one collective may take, so that a lost rank is noticed."""


def join(
    rank: int | None = None,
    world: int | None = None,
    address: str | None = None,
    backend: str | None = None,
    seconds: float = SECONDS,
) -> dist.ProcessGroup:
    """Wait for all ranks, and choose this one's GPU. `address` is `host:port` of the first rank.

    What is left out comes from the variables torchrun sets: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; LOCAL_RANK
    says which GPU. Ranks meet over NCCL where there are GPUs, and over gloo for what lies in the host's memory.
    """
    rank = _number("RANK") if rank is None else rank
    world = _number("WORLD_SIZE") if world is None else world
    address = address or f"{_variable('MASTER_ADDR')}:{_variable('MASTER_PORT')}"
    if not 0 <= rank < world:
        raise TrainerError(f"rank {rank} is not one of {world} ranks, which are 0 to {world - 1}")
    gpus = torch.cuda.device_count()
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    if "nccl" in backend:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank % gpus)))
    meeting = address if "://" in address else f"tcp://{address}"
    limit = timedelta(seconds=seconds)
    try:
        store, *_ = next(dist.rendezvous(meeting, rank, world, timeout=limit))
        store = dist.PrefixStore(_store_prefix(), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise TrainerError(f"rank {rank} of {world} did not meet the others at {address}: {error}") from error
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def abort_group() -> None:
    """End what this process waits for from the others, who will not come; it can only destroy the groups then."""
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):  # ranks that share matrices meet in groups of their own
            with contextlib.suppress(RuntimeError):  # gloo notices by itself, and may not be able to
                group.abort()


def destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _store_prefix() -> str:
    """A torchrun that starts all ranks once more keeps its store, where the addresses of the dead still are. Only on
    one machine do all ranks count their lives alike."""
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return f"life {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if alone else '0'}"


def _number(name: str) -> int:
    value = _variable(name)
    if not value.isdecimal():
        raise TrainerError(f"{name} is `{value}`, not a number")
    return int(value)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise TrainerError(
            f"this process is to be one of several ranks, but {name} is not set, which torchrun would do"
        )
    return value


DIMENSIONS = ("replica", "shard", "context", "tensor")


class World:
    """Sums over all ranks; alone it does nothing. Every rank must ask for the same sums in the same order.

    Scales already hold the counts of all ranks, so gradients are added, never averaged: any number of ranks gives the
    same update.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.size = 1 if group is None else dist.get_world_size(group)
        self.group = group if self.size > 1 else None
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self._device = device

    def sum(self, values: Tensor) -> Tensor:
        """A small vector, summed over the ranks in float64."""
        if self.group is None:
            return values.double()
        total = values.to(self._device, torch.float64, copy=True)
        dist.all_reduce(total, group=self.group)
        return total

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """A vector of every rank, equally long on all, in the host's memory."""
        mine = values.to(self._device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        return [row.cpu() for row in rows]

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        if self.group is None:
            return
        waiting = []
        for parameter in parameters:
            if parameter.grad is None:  # another rank may have one
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.device.type == self._device.type:
                waiting.append(dist.all_reduce(parameter.grad, group=self.group, async_op=True))
                continue
            # Offloaded, and the ranks meet on the GPU: one at a time, because all would not fit.
            grad = parameter.grad.to(self._device)
            dist.all_reduce(grad, group=self.group)
            parameter.grad.copy_(grad)
        for work in waiting:
            work.wait()  # bounded: by the process group's own timeout


def gather_samples(samples: Sequence[Sample], world: World, budget: int) -> tuple[list[Sample], int]:
    """All ranks' samples, the first rank's first; and the smallest of their budgets, which all can run."""
    assert world.size > 1
    data = encode(samples)
    sizes, budgets = zip(*(row.tolist() for row in world.all_gather(torch.tensor([len(data), budget]))), strict=True)
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [row[:size].numpy().tobytes() for row, size in zip(world.all_gather(padded), sizes, strict=True)]
    return [sample for part in parts for sample in decode(part)], min(budgets)


class Ranks:
    """All ranks in a grid, by what they have in common. Its last dimensions change fastest, so that the ranks which
    talk most are neighbours.

    Ranks of one `context` and `tensor` group are one data rank: they get the same samples and report the same sums.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, settings: ParallelConfig) -> None:
        self._group, self.device = group, device
        members = [0] if group is None else dist.get_process_group_ranks(group)
        sizes = (settings.replicas, -1, settings.context, settings.tensor) if group is not None else (1, 1, 1, 1)
        self.grid = torch.tensor(members).view(sizes)
        self._subgroups: dict[tuple[str, ...], World] = {}
        self.all = World(group, device)
        self.data = self.subgroup("replica", "shard")
        """One of each data rank: what is counted here is counted once."""
        self.gradient_group = self.subgroup("replica", "shard", "context")
        """Those that compute different tokens with the same weights: their gradients add up."""
        self.context = self.subgroup("context")
        """Those that share sequences."""

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Rows of ranks that share each layer's weights, of which several may hold a model each, and beside each rank
        those it shares matrices with. Ranks that share sequences compute different tokens: here they are like any
        others."""
        sizes = {"replica": self.grid.shape[0], "shard": -1, "tensor": self.grid.shape[3]}
        kept = {name: size for name, size in sizes.items() if name == "shard" or size > 1}
        return DeviceMesh(self.device.type, self.grid.reshape(tuple(kept.values())), mesh_dim_names=tuple(kept))

    def subgroup(self, *dimensions: str) -> World:
        """The ranks that differ from this one only in these. Every rank must ask, in the same order."""
        if dimensions not in self._subgroups:
            self._subgroups[dimensions] = self._form_subgroup(*dimensions)
        return self._subgroups[dimensions]

    def _form_subgroup(self, *dimensions: str) -> World:
        at = [DIMENSIONS.index(name) for name in dimensions]
        others = [dim for dim in range(len(DIMENSIONS)) if dim not in at]
        rows = self.grid.permute(*others, *at).reshape(-1, prod(self.grid.shape[i] for i in at))
        if len(rows) == 1:
            return self.all
        if rows.shape[1] == 1:
            return World(None, self.device)
        assert self._group is not None
        own = None
        for row in rows.tolist():
            made = dist.new_group(row, timeout=timedelta(seconds=SECONDS))
            own = made if dist.get_rank() in row else own
        return World(own, self.device)
