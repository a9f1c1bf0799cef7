"""Joins this process to the process group of all ranks, and leaves it."""

import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.trainer.base import TrainerError

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
        store = dist.PrefixStore(_life(), store)
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


def _life() -> str:
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
