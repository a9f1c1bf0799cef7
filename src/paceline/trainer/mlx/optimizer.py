"""AdamW over float32 masters, gradient clipping, and trainable tensors under torch's and peft's names."""

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from paceline.config import trainer as config
from paceline.trainer.backend import Schedule
from paceline.weights.update import fingerprint

ADAPTER = ".default.weight"
"""peft's name for its only adapter, whose matrices are modules."""


class MlxTensors:
    """The arrays of a model that train. Read and replaced, never changed: arrays of mlx cannot be, so that copies may
    share them."""

    def __init__(self, net: Any) -> None:
        self._net = net
        self._types = {name: array.dtype for name, array in self.current().items()}

    def current(self) -> dict[str, mx.array]:
        return flatten_tree(self._net.trainable_parameters())

    @property
    def adapters_only(self) -> bool:
        return all(name.endswith(ADAPTER) for name in self.current())

    def put(self, tensors: Mapping[str, mx.array]) -> None:
        """Replace some, rounded to the model's type."""
        rounded = {name: tensor.astype(self._types[name]) for name, tensor in tensors.items()}
        mx.eval(rounded)
        self._net.update(unflatten_tree(rounded))

    def set_aside(self, names: Mapping[str, mx.array]) -> dict[str, mx.array]:
        current = self.current()
        return {name: current[name] for name in names}

    def copy(self, tensor: mx.array, wide: bool) -> mx.array:
        kept = tensor.astype(mx.float32) if wide else tensor
        mx.eval(kept)
        return kept

    def copy_into(self, kept: dict[str, mx.array], tensors: Mapping[str, mx.array]) -> None:
        kept |= {name: tensor.astype(kept[name].dtype) for name, tensor in tensors.items()}
        mx.eval(kept)

    def average_into(self, kept: dict[str, mx.array], name: str, master: mx.array, weight: float) -> None:
        kept[name] += weight * (master - kept[name])
        mx.eval(kept[name])

    def for_checkpoint(self, name: str, tensor: mx.array) -> mx.array:
        return tensor

    def fingerprint(self, kept: Mapping[str, mx.array]) -> str:
        return fingerprint(kept.items())

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
        return beside, flatten_tree(gradients)


def flatten_tree(tree: Any) -> dict[str, mx.array]:
    """A module's tree of arrays as a flat dict."""
    halves = (".lora_A", ".lora_B")
    return {name + ADAPTER if name.endswith(halves) else name: array for name, array in tree_flatten(tree)}


def unflatten_tree(arrays: Mapping[str, mx.array]) -> Any:
    """The tree of a flat dict of arrays."""
    return tree_unflatten([(name.removesuffix(ADAPTER), array) for name, array in arrays.items()])


class MlxAdamW:
    """torch's AdamW to the last digits, with masters, moments and gradient sums in float32, whatever the model computes
    in. All of it is computed as soon as it is asked for: what is put off keeps everything it is made of in memory."""

    def __init__(self, parameters: MlxTensors, c: config.OptimizerConfig, total_steps: int | None, half: bool) -> None:
        self._config = c
        self.schedule = Schedule(c, total_steps, half)
        self._parameters = parameters
        self.masters = {name: p.astype(mx.float32) for name, p in parameters.current().items()}
        mx.eval(self.masters)
        self._moments: dict[str, tuple[mx.array, mx.array]] = {}
        self.gradients: dict[str, mx.array] = {}
        """Gradient sums since the last step."""

    def backward(self, loss_of: Callable[[], tuple[mx.array, Any]]) -> Any:
        """Add the gradient of a loss, scaled until `clip`; answers with what comes beside the loss, computed too."""
        beside, gradients = self._parameters.differentiate(loss_of, self.schedule.scale)
        self.add(gradients)
        mx.eval(beside)
        return beside

    def take_gradients(self) -> dict[str, mx.array]:
        held, self.gradients = self.gradients, {}
        return held

    def add_gradients(self, held: Mapping[str, mx.array], factor: float = 1.0) -> None:
        self.add(held if factor == 1 else {name: gradient * factor for name, gradient in held.items()})

    def add(self, gradients: Mapping[str, mx.array]) -> None:
        """A micro-batch's gradient, of a scaled loss. Some come transposed, and all that follows would be, too."""
        held = self.gradients
        added = {name: mx.contiguous(g.astype(mx.float32)) for name, g in gradients.items()}
        self.gradients = held | {name: held[name] + g if name in held else g for name, g in added.items()}
        mx.eval(self.gradients)

    def clip(self) -> float:
        if not self.gradients:
            return 0.0
        size = mx.sqrt(mx.stack([g.square().sum() for g in self.gradients.values()]).sum()).item() / self.schedule.scale
        factor = min(1.0, self._config.max_grad_norm / (size + 1e-6)) / self.schedule.scale
        if factor != 1:
            self.gradients = {name: g * factor for name, g in self.gradients.items()}
            mx.eval(self.gradients)
        return size

    def step(self) -> None:
        """One parameter at a time, so that what is computed on the way needs room for one."""
        c, lr = self._config, self.schedule.lr
        self.schedule.count_step()
        beta, gamma = c.betas
        shrink, root = lr / (1 - beta**self.schedule.steps), sqrt(1 - gamma**self.schedule.steps)
        for name in list(self.gradients):
            gradient = self.gradients.pop(name)
            mean, square = self._moments.get(name) or (mx.zeros_like(gradient), mx.zeros_like(gradient))
            mean = mean + (1 - beta) * (gradient - mean)
            square = gamma * square + (1 - gamma) * gradient.square()
            decayed = self.masters[name] * (1 - lr * c.weight_decay)
            self.masters[name] = decayed - shrink * mean / (square.sqrt() / root + c.eps)
            self._moments[name] = mean, square
            mx.eval(self.masters[name], mean, square)
        self._parameters.put(self.masters)
        self.zero()

    def zero(self) -> None:
        self.gradients = {}

    def tensors(self) -> dict[str, mx.array]:
        out = {f"master/{name}": master for name, master in self.masters.items()}
        for name, (mean, square) in self._moments.items():
            out |= {f"exp_avg/{name}": mean, f"exp_avg_sq/{name}": square}
        return out

    def load(self, tensors: Mapping[str, mx.array], steps: int, scale: float | None = None) -> None:
        self.schedule.load(steps, scale)
        self.masters = {name: tensors[f"master/{name}"].astype(mx.float32) for name in self.masters}
        self._moments = {
            name: (tensors[f"exp_avg/{name}"], tensors[f"exp_avg_sq/{name}"])
            for name in self.masters
            if f"exp_avg/{name}" in tensors
        }
        mx.eval(self.masters)
        self._parameters.put(self.masters)
