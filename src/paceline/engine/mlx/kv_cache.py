"""The KV cache in MLX: a slot per running request, and the part each row of a pass attends to.

A pass is one call of the model. mlx-lm's models ask a cache object, one a layer, for three things: the rows' offsets,
the mask, and all keys and values after adding the new ones. A pass answers for all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from paceline.engine.kv_cache import BaseSlotCache
from paceline.engine.sequence import Chunk
from paceline.model.mlx.loading import MlxModel
from paceline.model.source import ModelError


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of the keys and values that every layer keeps of a token."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype


class MlxSlotCache(BaseSlotCache):
    """Keys and values as [slot, kv head, position, dim] per layer: of the first slots and positions a view is all that
    attention needs. One slot more than asked for takes the writes of padding.

    Arrays of MLX never change; a write to one with no other holder reuses its memory. So nothing here may keep a view
    beyond a step, or every write would copy the whole cache.
    """

    def __init__(self, shape: KVShape, slots: int, length: int, max_length: int, deterministic: bool = False) -> None:
        self._shape = shape
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        super().__init__(slots, length, max_length, deterministic)

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

    def _free_memory(self) -> None:
        self.keys, self.values = [], []
        mx.clear_cache()

    def _copy_slot(self, source: int, length: int, targets: Sequence[int]) -> None:
        slots = mx.array(targets)
        rows = [mx.contiguous(layer[source, :, :length]) for layer in self.arrays]
        mx.eval(rows)
        for layer, row in zip(self.arrays, rows, strict=True):
            layer[slots, :, :length] = row[None]

    def _zero_slot(self, slot: int) -> None:
        for layer in self.arrays:
            layer[slot] = 0

    def _resize(self, length: int) -> None:
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                store[layer] = mx.pad(old, [(0, 0), (0, 0), (0, length - old.shape[2]), (0, 0)])
                mx.eval(store[layer])  # one at a time: never all of them twice

    def write(self, layer: int, slots: mx.array, positions: mx.array, keys: mx.array, values: mx.array) -> None:
        """Keys and values of [rows, kv heads, tokens, dim], to a slot and a position of [rows, tokens] each."""
        self.keys[layer][slots, :, positions] = keys.transpose(0, 2, 1, 3)
        self.values[layer][slots, :, positions] = values.transpose(0, 2, 1, 3)


WIDTH_STEP = 64
"""Attention looks at a multiple of so many positions: fewer shapes, whose memory is used again."""


class MlxDecodePass:
    """Rows of tokens, padded on the right. What padding writes goes to the scratch slot; what it computes is thrown
    away.

    A prompt's beginning sees what it brings and nothing from the cache: it has no `width`. Other rows see so many
    positions of `gathered` slots, one a row, or else of the first slots in place, each at the row of its number.
    """

    def __init__(
        self, cache: MlxSlotCache, rows: Sequence[Chunk | None], width: int | None = None,
        gathered: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.chunks = [(row, chunk) for row, chunk in enumerate(rows) if chunk is not None]
        """Those that are no padding, with their rows."""
        self._cache, self._width = cache, width
        self._gathered = None if gathered is None else mx.array(list(gathered))
        self.tokens_per_row = longest = max(chunk.length for _, chunk in self.chunks)
        starts = np.zeros((len(rows), 1), np.int32)
        slots = np.full((len(rows), longest), cache.scratch, np.int32)
        for row, chunk in self.chunks:
            starts[row] = chunk.start
            slots[row, : chunk.length] = chunk.sequence.slot
        positions = starts + np.arange(longest, dtype=np.int32)
        self.rows = len(rows)
        self.offset = mx.array(starts[:, 0])
        self.mask = "causal" if width is None else mx.array(np.arange(width) <= positions[:, None, :, None])
        self._slots = mx.array(slots)
        self._positions = mx.array(np.where(slots == cache.scratch, 0, positions))

    @property
    def caches(self) -> list["LayerCache"]:
        return [LayerCache(self, layer) for layer in range(len(self._cache.keys))]

    def update_and_fetch(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Put new keys and values into the cache; answers with all that the rows look at."""
        self._cache.write(layer, self._slots, self._positions, keys, values)
        return self._visible(self._cache.keys[layer], keys), self._visible(self._cache.values[layer], values)

    def _visible(self, kept: mx.array, new: mx.array) -> mx.array:
        if self._width is None:
            return new
        if self._gathered is None:
            return kept[: self.rows, :, : self._width]
        return kept[:, :, : self._width][self._gathered]


class LayerCache:
    """The cache object of one layer, as mlx-lm's models use it."""

    def __init__(self, step: MlxDecodePass, layer: int) -> None:
        self._step, self._layer, self.offset = step, layer, step.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._step.update_and_fetch(self._layer, keys, values)

    def make_mask(self, tokens: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str:
        assert window_size is None  # such layers are refused when a model is loaded
        return self._step.mask


def decode_pass(cache: MlxSlotCache, chunks: Sequence[Chunk], deterministic: bool) -> MlxDecodePass:
    """One token a row, with all that came before it. Slots in use lie mostly side by side: a few idle rows between cost
    less than to bring the others together. With `deterministic` all slots always take part, at full width."""
    slots = [chunk.sequence.slot for chunk in chunks]
    rows = cache.slots if deterministic else max(slots) + 1
    width = cache.length if deterministic else _width(cache, chunks)
    if not deterministic and 4 * len(chunks) < 3 * rows:
        return MlxDecodePass(cache, chunks, width, slots)
    by_slot = {chunk.sequence.slot: chunk for chunk in chunks}
    return MlxDecodePass(cache, [by_slot.get(row) for row in range(rows)], width)


def prompt_passes(cache: MlxSlotCache, chunks: Sequence[Chunk], deterministic: bool) -> list[MlxDecodePass]:
    """Pieces of prompts, those of like length together: padding never doubles the work. With `deterministic` each
    alone, so that no neighbour can change its bits."""
    alike: dict[Any, list[Chunk]] = {}
    for number, chunk in enumerate(chunks):
        kind = number if deterministic else (chunk.start > 0, chunk.length.bit_length())
        alike.setdefault(kind, []).append(chunk)
    passes = []
    for group in alike.values():
        first, width, slots = group[0], None, None
        if first.start > 0:
            width = first.start + first.length if deterministic else _width(cache, group)
            slots = [chunk.sequence.slot for chunk in group]
        passes.append(MlxDecodePass(cache, group, width, slots))
    return passes


def _width(cache: MlxSlotCache, chunks: Sequence[Chunk]) -> int:
    needed = max(chunk.start + chunk.length for chunk in chunks)
    return min(cache.length, -(-needed // WIDTH_STEP) * WIDTH_STEP)


def kv_shape(model: MlxModel) -> KVShape:
    """Found by asking: one token goes through the model, and every layer says what it would keep."""
    probes = [_CacheProbe() for _ in model.layers]
    mx.eval(model.hidden(mx.zeros((1, 1), mx.int32), probes))
    specs = {probe.kv_spec for probe in probes}
    if len(specs) != 1 or None in specs:
        raise ModelError(f"{model.config.model_type}: layers keep keys and values of different shapes; not supported")
    kv_heads, key_dim, value_dim, dtype = specs.pop()
    return KVShape(len(probes), kv_heads, key_dim, value_dim, dtype)


class _CacheProbe:
    """A cache that keeps nothing and writes down what it was given."""

    offset = 0

    def __init__(self) -> None:
        self.kv_spec: Any = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.kv_spec = (keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        return keys, values

    def make_mask(self, tokens: int, return_array: bool = False, window_size: int | None = None) -> None:
        return None
