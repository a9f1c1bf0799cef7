"""Implements `ops.py` in torch."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

CALLED = "a torch tensor"

where, minimum, maximum, isnan = torch.where, torch.minimum, torch.maximum, torch.isnan
zeros_like, ones_like = torch.zeros_like, torch.ones_like


def zeros(count: int, like: Tensor) -> Tensor:
    return like.new_zeros(count)


def stop(x: Tensor) -> Tensor:
    return x.detach()


def clip(x: Tensor, low: float | None, high: float | None) -> Tensor:
    return x.clamp(low, high)


def stack(arrays: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(arrays))


def total(x: Tensor) -> Tensor:
    return x.sum(dtype=torch.float64)


def take(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index)


def put(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return x.index_copy(0, index, values.to(x.dtype))


def places(mask: Tensor) -> Tensor:
    return mask.nonzero()[:, 0]


def segment_sums(values: Tensor, segments: Tensor, count: int) -> Tensor:
    return values.new_zeros(count).index_add(0, segments, values)


def all_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def quiet() -> AbstractContextManager:
    return torch.no_grad()
