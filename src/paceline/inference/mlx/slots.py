"""A slot per running request, in MLX."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from paceline.inference.engine.cache import Slots


@dataclass(frozen=True, slots=True)
class KeyShape:
    """Shape of the keys and values that every layer keeps of a token."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype


class MlxSlots(Slots):
    """Keys and values as [slot, kv head, position, dim] per layer: of the first slots and positions a view is all that
    attention needs. One slot more than asked for takes the writes of padding.

    Arrays of MLX never change; a write to one with no other holder reuses its memory. So nothing here may keep a view
    beyond a step, or every write would copy the whole cache.
    """

    def __init__(self, shape: KeyShape, slots: int, length: int, max_length: int, steady: bool = False) -> None:
        super().__init__(slots, length, max_length, steady)
        self._shape = shape
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.wake()

    @property
    def scratch(self) -> int:
        """The slot that is never read."""
        return self.slots

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.keys, *self.values]

    def wake(self) -> None:
        shape = self._shape
        self.keys, self.values = (
            [mx.zeros((self.slots + 1, shape.kv_heads, self.length, dim), shape.dtype) for _ in range(shape.layers)]
            for dim in (shape.key_dim, shape.value_dim)
        )
        mx.eval(self.arrays)

    def _drop(self) -> None:
        self.keys, self.values = [], []
        mx.clear_cache()

    def _copy(self, source: int, length: int, targets: Sequence[int]) -> None:
        slots = mx.array(targets)
        rows = [mx.contiguous(layer[source, :, :length]) for layer in self.arrays]
        mx.eval(rows)
        for layer, row in zip(self.arrays, rows, strict=True):
            layer[slots, :, :length] = row[None]

    def _blank(self, slot: int) -> None:
        for layer in self.arrays:
            layer[slot] = 0

    def _widen(self, length: int) -> None:
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                store[layer] = mx.pad(old, [(0, 0), (0, 0), (0, length - old.shape[2]), (0, 0)])
                mx.eval(store[layer])  # one at a time: never all of them twice

    def write(self, layer: int, slots: mx.array, positions: mx.array, keys: mx.array, values: mx.array) -> None:
        """Keys and values of [rows, kv heads, tokens, dim], to a slot and a position of [rows, tokens] each."""
        self.keys[layer][slots, :, positions] = keys.transpose(0, 2, 1, 3)
        self.values[layer][slots, :, positions] = values.transpose(0, 2, 1, 3)
