"""Maps trainable mlx arrays to their torch and peft names: a checkpoint fits either library."""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

ADAPTER = ".default.weight"
"""peft's name for its only adapter, whose matrices are modules."""


class Parameters:
    """Read and replaced, never changed: arrays of mlx cannot be."""

    def __init__(self, net: Any) -> None:
        self._net = net
        self._types = {name: array.dtype for name, array in self.now().items()}

    def now(self) -> dict[str, mx.array]:
        return named(self._net.trainable_parameters())

    def put(self, arrays: Mapping[str, mx.array]) -> None:
        """Replace some, rounded to the model's type."""
        rounded = {name: array.astype(self._types[name]) for name, array in arrays.items()}
        mx.eval(rounded)
        self._net.update(tree(rounded))

    def differentiate(
        self, loss_of: Callable[[], tuple[mx.array, Any]], scale: float
    ) -> tuple[Any, dict[str, mx.array]]:
        """The gradient of a loss times `scale`, still to be computed, and what comes beside the loss. While it is
        traced the model is made of what is differentiated."""

        def scaled(weights: Any) -> tuple[mx.array, Any]:
            self._net.update(weights)
            loss, beside = loss_of()
            return loss * scale, beside

        held = self._net.trainable_parameters()
        try:
            # Another tree than the one held: mlx puts what it traces into the tree it is given.
            (_, beside), gradients = mx.value_and_grad(scaled)(self._net.trainable_parameters())
        finally:
            self._net.update(held)
        return beside, named(gradients)


def named(tree: Any) -> dict[str, mx.array]:
    """A module's tree of arrays, flat."""
    return {name + ADAPTER if _is_adapter(name) else name: array for name, array in tree_flatten(tree)}


def tree(arrays: Mapping[str, mx.array]) -> Any:
    """And back."""
    return tree_unflatten([(name.removesuffix(ADAPTER), array) for name, array in arrays.items()])


def _is_adapter(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))
