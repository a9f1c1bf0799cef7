"""Implements `ops.py` in mlx."""

from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx
import numpy as np

CALLED = "an mlx array"

where, minimum, maximum, isnan, exp, square = mx.where, mx.minimum, mx.maximum, mx.isnan, mx.exp, mx.square
zeros_like, ones_like, stop = mx.zeros_like, mx.ones_like, mx.stop_gradient


def zeros(like: mx.array, count: int) -> mx.array:
    return mx.zeros(count, like.dtype)


def stack(*arrays: mx.array) -> mx.array:
    return mx.stack(list(arrays))


def clip(x: mx.array, low: float | None = None, high: float | None = None) -> mx.array:
    """mx.clip has no gradient on its bounds: with none to spare, as in PPO with a clip of 0, nothing would learn."""
    x = x if low is None else mx.where(x < low, low, x)
    return x if high is None else mx.where(x > high, high, x)


def total(x: mx.array) -> mx.array:
    """In float32 at least: a GPU of Apple's has nothing wider."""
    return (x if x.dtype == mx.float64 else x.astype(mx.float32)).sum()


def take(x: mx.array, index: mx.array) -> mx.array:
    return mx.take(x, index, axis=0)


def put(x: mx.array, index: mx.array, values: mx.array) -> mx.array:
    return x.at[index].add(values.astype(x.dtype) - x[index])


def flatnonzero(mask: mx.array) -> mx.array:
    return mx.array(np.flatnonzero(np.asarray(mask)))


def segment_sums(values: mx.array, segments: mx.array, count: int) -> mx.array:
    return mx.zeros((count,), values.dtype).at[segments].add(values)


def no_grad(_: mx.array) -> AbstractContextManager:
    """Only what is asked for is differentiated here."""
    return nullcontext()
