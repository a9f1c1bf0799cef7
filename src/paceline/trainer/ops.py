"""Array operations of the loss, dispatched to torch, mlx or numpy by their first argument.

So the loss is written once. `a * b`, `a > b`, `~a`, `a.sum()` and `a[index]` mean the same in all three; all else is
one of the names below. The operations follow torch, gradients included: where mlx differs, its side makes up for it.
numpy has no gradients: it is for tools that show a loss and train nothing.
"""

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from paceline.weights.update import Array

BACKENDS = {
    "torch": "paceline.trainer.torch.ops",
    "mlx": "paceline.trainer.mlx.ops",
    "numpy": "paceline.trainer.numpy_ops",
}
"""The module that implements the operations, by the package that an array's type comes from."""


def ops_of(array: Array) -> ModuleType:
    """The implementation for an array."""
    return _backend(type(array))


@cache
def _backend(kind: type) -> ModuleType:
    root = next(root for base in kind.__mro__ if (root := base.__module__.partition(".")[0]) in BACKENDS)
    return importlib.import_module(BACKENDS[root])


def _op(name: str) -> Callable[..., Any]:
    def run(x: Array, *rest: Any, **named: Any) -> Any:
        return getattr(ops_of(x), name)(x, *rest, **named)

    return run


where, minimum, maximum, isnan, exp, square = map(_op, ("where", "minimum", "maximum", "isnan", "exp", "square"))
zeros_like, ones_like = _op("zeros_like"), _op("ones_like")
zeros = _op("zeros")
"""zeros(like, count): of the same type and in the same place as `like`."""
stack = _op("stack")
"""stack(*arrays)"""
stop = _op("stop")
"""sg[x]: the same numbers, through which no gradient flows."""
clip = _op("clip")
"""clip(x, low=None, high=None): the gradient passes inside the bounds and on them."""
total = _op("total")
"""The sum in the widest type the library can add up in where the array lies."""
take = _op("take")
"""take(x, index): the elements at these places."""
put = _op("put")
"""put(x, index, values): a copy with other elements at these places."""
flatnonzero = _op("flatnonzero")
"""Where a mask is true."""
segment_sums = _op("segment_sums")
"""segment_sums(values, segments, count): the sum of each of `count` segments."""
no_grad = _op("no_grad")
"""A context in which nothing is computed for a gradient."""
