"""The process group of all ranks: joins and leaves it, sums over it, and says how weights lie on it."""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from paceline.config.cluster import ParallelConfig
from paceline.data import Sample, decode, encode
from paceline.errors import TrainerError
from paceline.weights.update import MASK, fingerprint

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


def call_off() -> None:
    """End what this process waits for from the others, who will not come; it can only leave then."""
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):  # ranks that share matrices meet in groups of their own
            with contextlib.suppress(RuntimeError):  # gloo notices by itself, and may not be able to
                group.abort()


def leave() -> None:
    """End the meeting. What this process does afterwards it does alone."""
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
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._device = device

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

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
    if world.group is None:
        return list(samples), budget
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
        self.all = World(group, device)
        self.data = self.subgroup("replica", "shard")
        """One of each data rank: what is counted here is counted once."""
        self.tokens = self.subgroup("replica", "shard", "context")
        """Those that compute different tokens with the same weights: their gradients add up."""
        self.context = self.subgroup("context")
        """Those that share sequences."""

    def subgroup(self, *dimensions: str) -> World:
        """The ranks that differ from this one only in these. Every rank must ask, in the same order."""
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


T = TypeVar("T")


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory; all of it where it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


class RankLayout:
    """How a model's weights lie on the ranks. Plainly every rank, or the only one, holds all of them, and ranks need
    not keep step with each other.

    Of a model that `shard` has cut its ranks are given. Under FSDP it has a `root`: what trains lies on the ranks in
    float32 and is rounded to the compute type on its way into a layer, so a rank's part of a parameter is its own
    master. Gradients come back in float32, summed over all ranks and never divided: the loss's scales hold the counts
    of all ranks already. Adapters are small and stay whole on every rank.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        model: nn.Module | None = None,
        ranks: Ranks | None = None,
        root: Any = None,
        partial: frozenset[str] = frozenset(),
    ) -> None:
        self.dtype = dtype
        """What the model computes in and publishes."""
        self.is_sharded = ranks is not None
        """The model's tensors lie on several ranks: all must run equally many forward and backward passes."""
        self._root, self._partial = root, partial
        named = [] if model is None else model.named_parameters()
        self._parameters = {name: p for name, p in named if isinstance(p, DTensor)}
        self._device = None if ranks is None else ranks.device
        self._tensor = World(None, torch.device("cpu")) if ranks is None else ranks.subgroup("tensor")
        self.shards = None if ranks is None else self._tensor
        """The ranks that share one model between them, where one is shared."""
        if ranks is not None and root is not None:
            self.shards = ranks.subgroup("shard", "context", "tensor")

    def run(self, work: Callable[[], T]) -> T:
        """Do work that needs the model's own weights: a forward pass and the head after it."""
        if self._root is None:
            return work()
        done = self._root(work)
        if not torch.is_grad_enabled():
            # No backward pass will: and until then the root would compute with the weights of now.
            self._root.reshard()
        return done

    def is_summed(self, name: str) -> bool:
        """Whether a parameter's gradient comes as the sum over all ranks."""
        return self._root is not None and name in self._parameters

    def replica_count(self, name: str) -> int:
        """How many of `shards` hold the same part of a parameter."""
        assert self.shards is not None
        return self.shards.size // prod(self._cuts(name).values())

    def sync_replicated(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Make the gradients of replicated parameters equal on all ranks. Every rank must ask, once per step."""
        whole = [name for name in masters if "tensor" not in self._cuts(name)]
        if self._tensor.size == 1 or not whole:
            return
        self._tensor.sum_gradients(masters[name] for name in whole)
        # The other gradients are the same but for rounding, by which ranks must not drift apart: all take the mean.
        same = [masters[name].grad for name in whole if name not in self._partial]
        torch._foreach_div_([grad for grad in same if grad is not None], self._tensor.size)

    def _cuts(self, name: str) -> dict[str, int]:
        """Into how many parts a parameter is cut along which dimension of the mesh."""
        if name not in self._parameters:
            return {}
        parameter = self._parameters[name]
        mesh = parameter.device_mesh
        sizes = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
        return {dimension: size for dimension, size, placement in sizes if not placement.is_replicate()}

    def compute_dtype(self, parameter: Tensor) -> torch.dtype:
        """The type a parameter is computed with, which it may be kept wider than."""
        return self.dtype if self.is_sharded else parameter.dtype

    def shard_like(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of something shaped like a parameter, as a tensor that knows where it belongs."""
        if name not in self._parameters:
            return tensor
        spec = self._parameters[name]._spec
        assert spec.tensor_meta is not None
        # Not `from_local`, which would move what is kept on the host to the mesh's device.
        meta = spec.tensor_meta._replace(dtype=tensor.dtype)
        return DTensor(tensor, replace(spec, tensor_meta=meta), requires_grad=False)

    def full_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """All ranks' parts of something shaped like a parameter; every rank must ask."""
        if name not in self._parameters:
            return tensor
        tensor = tensor.to(self._device, self.dtype)  # rounded first: half the bytes to send
        full = self.shard_like(name, tensor)
        assert isinstance(full, DTensor)
        for done in range(1, len(full.placements) + 1):  # what is cut twice comes together in two steps
            full = full.redistribute(placements=(Replicate(),) * done + full.placements[done:])
        return full.to_local()

    def empty_shard(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for this rank's part of a tensor that a checkpoint holds under a parameter's name."""
        if name not in self._parameters or self._parameters[name].shape != shape:
            return torch.empty(shape, dtype=dtype)
        return self.shard_like(name, torch.empty_like(local_shard(self._parameters[name].detach()), dtype=dtype))

    def fingerprint(self, tensors: Mapping[str, Tensor]) -> str:
        """Of the whole tensors, one at a time: fingerprints add up."""
        parts = (fingerprint([(name, self.full_tensor(name, tensor))]) for name, tensor in tensors.items())
        return f"{sum(int(part, 16) for part in parts) & MASK:016x}"

    def state(self, model: nn.Module, keep: bool) -> dict[str, Tensor]:
        """The model's state dict with whole tensors in the type it computes in, for a rank that keeps it. Every rank
        must ask. One tensor at a time: all at once would not fit beside the model."""
        if not self.is_sharded:
            return dict(model.state_dict()) if keep else {}
        known = {id(p): name for name, p in self._parameters.items()}
        done: dict[int, Tensor] = {}  # tied tensors are one, also in the file
        out: dict[str, Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in done:
                full = self.full_tensor(known.get(id(tensor), ""), local_shard(tensor.detach()))
                done[id(tensor)] = full.cpu() if keep else full.new_empty(0)
            out[name] = done[id(tensor)]
        return out if keep else {}
