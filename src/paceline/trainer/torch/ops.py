"""Implements `ops.py` in torch."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

CALLED = "a torch tensor"

where, minimum, maximum, isnan = torch.where, torch.minimum, torch.maximum, torch.isnan
exp, square, stop = torch.exp, torch.square, torch.detach
zeros_like, ones_like, zeros = torch.zeros_like, torch.ones_like, Tensor.new_zeros


def stack(*arrays: Tensor) -> Tensor:
    return torch.stack(arrays)


def clip(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    return x.clamp(low, high)


def total(x: Tensor) -> Tensor:
    return x.sum(dtype=torch.float64)


def take(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index)


def put(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return x.index_copy(0, index, values.to(x.dtype))


def flatnonzero(mask: Tensor) -> Tensor:
    return mask.nonzero()[:, 0]


def segment_sums(values: Tensor, segments: Tensor, count: int) -> Tensor:
    return values.new_zeros(count).index_add(0, segments, values)


def no_grad(_: Tensor) -> AbstractContextManager:
    return torch.no_grad()
