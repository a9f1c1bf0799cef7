"""Implements `ops.py` in mlx."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx
import numpy as np

CALLED = "an mlx array"

where, minimum, maximum, isnan = mx.where, mx.minimum, mx.maximum, mx.isnan
zeros_like, ones_like, stop = mx.zeros_like, mx.ones_like, mx.stop_gradient


def zeros(count: int, like: mx.array) -> mx.array:
    return mx.zeros(count, like.dtype)


def clip(x: mx.array, low: float | None, high: float | None) -> mx.array:
    """mx.clip has no gradient on its bounds: with none to spare, as in PPO with a clip of 0, nothing would learn."""
    x = x if low is None else mx.where(x < low, low, x)
    return x if high is None else mx.where(x > high, high, x)


def stack(arrays: Sequence[mx.array]) -> mx.array:
    return mx.stack(list(arrays))


def total(x: mx.array) -> mx.array:
    """In float32 at least: a GPU of Apple's has nothing wider."""
    return (x if x.dtype == mx.float64 else x.astype(mx.float32)).sum()


def take(x: mx.array, index: mx.array) -> mx.array:
    return mx.take(x, index, axis=0)


def put(x: mx.array, index: mx.array, values: mx.array) -> mx.array:
    return x.at[index].add(values.astype(x.dtype) - x[index])


def places(mask: mx.array) -> mx.array:
    return mx.array(np.flatnonzero(np.asarray(mask)))


def segment_sums(values: mx.array, segments: mx.array, count: int) -> mx.array:
    return mx.zeros((count,), values.dtype).at[segments].add(values)


def all_finite(x: mx.array) -> bool:
    return bool(mx.isfinite(x).all())


def quiet() -> AbstractContextManager:
    """Only what is asked for is differentiated here."""
    return nullcontext()
