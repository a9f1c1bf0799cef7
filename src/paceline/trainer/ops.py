"""Tensor operations of the loss, run by torch or mlx, whichever their arguments belong to.

So the loss is written once. `a * b`, `a > b`, `~a`, `a.exp()`, `a.square()` and `a.sum()` mean the same in both. The
operations follow torch, gradients included: where the libraries differ, mlx's side makes up for it.
"""

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import ModuleType

from paceline.weights.update import Array

HOMES = {"torch": "paceline.trainer.torch.ops", "mlx": "paceline.trainer.mlx.ops"}


def where(mask: Array, one: Array | float, other: Array | float) -> Array:
    return _of(mask).where(mask, one, other)


def stop(x: Array) -> Array:
    """sg[x]: the same numbers, through which no gradient flows."""
    return _of(x).stop(x)


def clip(x: Array, low: float | None = None, high: float | None = None) -> Array:
    """The gradient passes inside the bounds and on them."""
    return _of(x).clip(x, low, high)


def minimum(x: Array, y: Array) -> Array:
    return _of(x).minimum(x, y)


def maximum(x: Array, y: Array) -> Array:
    return _of(x).maximum(x, y)


def isnan(x: Array) -> Array:
    return _of(x).isnan(x)


def zeros_like(x: Array) -> Array:
    return _of(x).zeros_like(x)


def ones_like(x: Array) -> Array:
    return _of(x).ones_like(x)


def zeros(count: int, like: Array) -> Array:
    """A row of them, of the same type and in the same place."""
    return _of(like).zeros(count, like)


def stack(arrays: Sequence[Array]) -> Array:
    return _of(arrays[0]).stack(arrays)


def total(x: Array) -> Array:
    """The sum in the widest type the library can add up in where the array lies."""
    return _of(x).total(x)


def take(x: Array, index: Array) -> Array:
    """The elements at these places."""
    return _of(x).take(x, index)


def put(x: Array, index: Array, values: Array) -> Array:
    """A copy with other elements at these places."""
    return _of(x).put(x, index, values)


def places(mask: Array) -> Array:
    """Where it is true."""
    return _of(mask).places(mask)


def segment_sums(values: Array, segments: Array, count: int) -> Array:
    """The sum of each of `count` segments."""
    return _of(values).segment_sums(values, segments, count)


def all_finite(x: Array) -> bool:
    return _of(x).all_finite(x)


def quiet(x: Array) -> AbstractContextManager:
    """Nothing computed inside will be differentiated."""
    return _of(x).quiet()


def called(x: Array) -> str:
    """The library's name for its arrays."""
    return _of(x).CALLED


def _of(array: Array) -> ModuleType:
    return _home(type(array))


@cache
def _home(kind: type) -> ModuleType:
    root = next(root for base in kind.__mro__ if (root := base.__module__.partition(".")[0]) in HOMES)
    return importlib.import_module(HOMES[root])
