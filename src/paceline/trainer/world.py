"""The ranks that train one batch together, each on its own samples."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


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

    def each(self, values: Tensor) -> Tensor:
        """A small vector of every rank, one a row in float64: for what is to be summed and what to be compared."""
        if self.group is None:
            return values.double()[None]
        mine = values.to(self._device, torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        return torch.stack(rows)

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
