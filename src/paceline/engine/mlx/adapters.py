"""Runs LoRA adapters unmerged, from slots beside the layers: several at once, chosen per row.

    base(x) + ((x @ A.T) * mask) @ B.T        A [slots * rank, in], B [out, slots * rank], mask [rows, 1, slots * rank]

Nothing is compiled here: a compiled function keeps the arrays it saw first, and would go on with an adapter that was
replaced long ago.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from paceline.model.adapter_names import AdapterError, pair_halves
from paceline.model.mlx.loading import MlxModel
from paceline.model.mlx.lora import replace_layer, target_layers, widths
from paceline.weights.mlx_arrays import as_array, evaluate
from paceline.weights.update import Array


class MlxAdapterRoutes:
    """The mask each row of the current pass multiplies its slots by; None when no row uses any."""

    mask: mx.array | None = None


class LayerSlots:
    """The matrices of all slots beside one layer. In float32 whatever the model computes in, as they are trained."""

    def __init__(self, inputs: int, outputs: int, routes: MlxAdapterRoutes, slots: int, rank: int) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.a = mx.zeros((slots * rank, inputs))
        self.b = mx.zeros((outputs, slots * rank))
        self._routes = routes

    def add(self, x: mx.array, base: mx.array) -> mx.array:
        mask = self._routes.mask
        if mask is None:
            return base
        # Zeroed, not multiplied by zero: another slot's overflow would be NaN.
        low = mx.where(mask == 0, 0.0, x.astype(mx.float32) @ self.a.T) * mask
        return base + (low @ self.b.T).astype(base.dtype)


class MlxSlotLinear(nn.Linear):
    """A linear layer with the adapters of all slots beside it. Its parameters keep their names in the model."""

    side: LayerSlots

    def __call__(self, x: mx.array) -> mx.array:
        return self.side.add(x, super().__call__(x))


class MlxSlotQuantizedLinear(nn.QuantizedLinear):
    """The same over packed weights."""

    side: LayerSlots

    def __call__(self, x: mx.array) -> mx.array:
        return self.side.add(x, super().__call__(x))


class MlxAdapters:
    """The slots of one model. Slot 0 is the base itself; adapters live in 1 to `slots`."""

    def __init__(self, sides: Mapping[str, LayerSlots], routes: MlxAdapterRoutes, slots: int, rank: int) -> None:
        self.slots, self.rank = slots, rank
        self._sides = dict(sides)
        self._routes = routes
        self._table = np.zeros((slots + 1, slots * rank), np.float32)
        """Factors by which a row of each slot multiplies all slots' columns."""
        self._ranks: list[dict[str, int]] = [{} for _ in range(slots + 1)]
        self._types: list[dict[str, mx.Dtype]] = [{} for _ in range(slots + 1)]

    def route(self, slots: list[int]) -> None:
        """Choose each row's slot for the next pass."""
        if not any(slots):
            self._routes.mask = None
            return
        self._routes.mask = mx.array(self._table[slots])[:, None]

    def load(self, slot: int, tensors: Mapping[str, mx.array], scale: float) -> None:
        """Replace what a slot holds, by tensors that `fit_to_slot` has made. A layer they do not name becomes zero."""
        here = self._columns(slot)
        ranks = {name.removesuffix(_A): tensor.shape[0] for name, tensor in tensors.items() if name.endswith(_A)}
        for name in {*self._ranks[slot], *ranks}:
            side = self._sides[name]
            side.a[here], side.b[:, here] = 0, 0
        self._ranks[slot] |= ranks  # before the first is written: whatever breaks off is zeroed by the next
        for name, rank in ranks.items():
            side, last = self._sides[name], here.start + rank
            side.a[here.start : last] = tensors[name + _A].astype(mx.float32)
            side.b[:, here.start : last] = tensors[name + _B].astype(mx.float32)
        mx.eval([array for side in self._sides.values() for array in (side.a, side.b)])
        self._ranks[slot] = ranks
        self._table[slot, here] = scale
        self._types[slot] = {name: tensor.dtype for name, tensor in tensors.items()}

    def tensors(self, slot: int) -> dict[str, mx.array]:
        """The tensors a slot really holds, at their true rank, by canonical name, in the type they came in."""
        start, held = self._columns(slot).start, {}
        for name, rank in self._ranks[slot].items():
            held[name + _A] = self._sides[name].a[start : start + rank]
            held[name + _B] = self._sides[name].b[:, start : start + rank]
        types = self._types[slot]
        return {name: tensor.astype(types.get(name, mx.float32)) for name, tensor in held.items()}

    def fit_to_slot(self, tensors: Mapping[str, Array]) -> dict[str, mx.array]:
        """The tensors by canonical names, computed. From any thread; refuses what does not fit a slot."""
        widths = {name: (side.inputs, side.outputs) for name, side in self._sides.items()}
        pairs = pair_halves(tensors, widths, self.rank)
        out = {name + _A: as_array(a) for name, (a, _) in pairs.items()}
        out |= {name + _B: as_array(b) for name, (_, b) in pairs.items()}
        _check_finite(out)
        return evaluate(out)

    def _columns(self, slot: int) -> slice:
        return slice((slot - 1) * self.rank, slot * self.rank)


_A, _B = ".lora_A.weight", ".lora_B.weight"


def _check_finite(tensors: Mapping[str, mx.array]) -> None:
    """All at once: one answer from the device instead of one a tensor."""
    good = mx.stack([mx.isfinite(tensor).all() for tensor in tensors.values()])
    if not good.all().item():
        name = list(tensors)[int(mx.argmin(good.astype(mx.int32)).item())].removesuffix(_A).removesuffix(_B)
        raise AdapterError(f"adapter layer `{name}` has values that are not finite")


def install(model: MlxModel, targets: Sequence[str] | str, slots: int, rank: int) -> MlxAdapters:
    """Put adapter slots beside the target layers, in place."""
    routes, sides = MlxAdapterRoutes(), {}
    for name, layer in target_layers(model, targets).items():
        sides[name] = LayerSlots(*widths(layer), routes, slots, rank)
        replace_layer(model.net, name, _add_slots(layer, sides[name]))
    mx.eval([array for side in sides.values() for array in (side.a, side.b)])
    return MlxAdapters(sides, routes, slots, rank)


def _add_slots(layer: Any, side: LayerSlots) -> Any:
    kind = MlxSlotQuantizedLinear if isinstance(layer, nn.QuantizedLinear) else MlxSlotLinear
    made = kind.__new__(kind)
    dict.update(made, layer)
    made.__dict__.update(vars(layer))
    made.side = side
    return made
