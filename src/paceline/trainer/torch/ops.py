"""Array operations of the loss in torch, where `terms.py` wants another than the function of that name."""

from contextlib import AbstractContextManager

import torch
from numpy.typing import NDArray
from torch import Tensor

LIBRARY, CALLED = torch, "a torch tensor"
stop = torch.detach


def total(x: Tensor) -> Tensor:
    return x.sum(dtype=torch.float64)


def put(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return x.index_copy(0, index, values.to(x.dtype))


def flatnonzero(mask: Tensor) -> Tensor:
    return mask.nonzero()[:, 0]


def segment_sums(values: Tensor, segments: Tensor, count: int) -> Tensor:
    return values.new_zeros(count).index_add(0, segments, values)


def no_grad(_: Tensor) -> AbstractContextManager:
    return torch.no_grad()


def to_host(x: Tensor) -> NDArray:
    return x.cpu().numpy()
