"""Array operations of the loss in mlx, where `terms.py` wants another than the function of that name."""

from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

LIBRARY, CALLED = mx, "an mlx array"
stop = mx.stop_gradient


def clip(x: mx.array, low: float | None, high: float | None) -> mx.array:
    """mx.clip has no gradient on its bounds: with none to spare, as in PPO with a clip of 0, nothing would learn."""
    x = x if low is None else mx.where(x < low, low, x)
    return x if high is None else mx.where(x > high, high, x)


def total(x: mx.array) -> mx.array:
    """In float32 at least: a GPU of Apple's has nothing wider."""
    return (x if x.dtype == mx.float64 else x.astype(mx.float32)).sum()


def put(x: mx.array, index: mx.array, values: mx.array) -> mx.array:
    return x.at[index].add(values.astype(x.dtype) - x[index])


def flatnonzero(mask: mx.array) -> mx.array:
    return mx.array(np.flatnonzero(np.asarray(mask)))


def segment_sums(values: mx.array, segments: mx.array, count: int) -> mx.array:
    return mx.zeros((count,), values.dtype).at[segments].add(values)


def no_grad(_: mx.array) -> AbstractContextManager:
    """Only what is asked for is differentiated here."""
    return nullcontext()


def to_host(x: mx.array) -> NDArray:
    return np.array(x)
