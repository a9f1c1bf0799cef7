"""The KV cache in plain torch: a slot per running request, or the memory of pages."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.engine.cpu import native
from paceline.engine.kv_cache import BaseSlotCache
from paceline.model.support import AttentionShape


class SlotCache(BaseSlotCache):
    """Keys and values as [slot, position, kv head, dim] per layer. One slot more than asked for takes the writes of
    padding rows."""

    def __init__(
        self, shape: AttentionShape, slots: int, length: int, max_length: int, dtype: torch.dtype, device: str,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        self._shape, self._dtype, self.device = shape, dtype, torch.device(device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        super().__init__(slots, length, max_length, deterministic)

    def wake(self) -> None:
        shape = (self.slots + 1, self.length, self._shape.kv_heads, self._shape.head_dim)
        self.keys, self.values = (
            [torch.zeros(shape, dtype=self._dtype, device=self.device) for _ in range(self._shape.layers)]
            for _ in range(2)
        )

    def _free_memory(self) -> None:
        self.keys, self.values = [], []

    def _copy_slot(self, source: int, length: int, targets: Sequence[int]) -> None:
        slots = torch.tensor(targets, device=self.device)
        for layer in (*self.keys, *self.values):
            layer[slots, :length] = layer[source, :length]

    def _zero_slot(self, slot: int) -> None:
        for layer in (*self.keys, *self.values):
            layer[slot].zero_()

    def _resize(self, length: int) -> None:
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                store[layer] = F.pad(old, (0, 0, 0, 0, 0, length - old.shape[1]))

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        keys, values = self.keys[layer], self.values[layer]
        if native.has_kernel(keys, keys.shape[2]):
            native.write_cache(keys, values, k, v, slots, positions)
        else:
            keys[slots, positions] = k
            values[slots, positions] = v

    def read(self, layer: int, slots: slice, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some slots, in place: [slots, width, kv heads, dim]."""
        return self.keys[layer][slots, :width], self.values[layer][slots, :width]


class TensorMemory:
    """Pages as an ordinary tensor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pages: Tensor | None = None

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._pages = torch.zeros(shape, dtype=dtype, device=self._device)
        return self._pages

    def sleep(self) -> None:
        """Shrink the tensor to nothing in place, so that its holders need not be told."""
        assert self._pages is not None
        self._size = self._pages.untyped_storage().size()
        self._pages.untyped_storage().resize_(0)

    def wake(self) -> None:
        assert self._pages is not None
        self._pages.untyped_storage().resize_(self._size)
        self._pages.zero_()
