"""The KV cache in plain torch: a slot per running request, or the memory of pages."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.engine.cpu import native
from paceline.engine.kv_cache import BaseSlotCache
from paceline.engine.sequence import Chunk
from paceline.model.states import States
from paceline.model.support import CacheShape

IntOrTensor = TypeVar("IntOrTensor", int, Tensor)


class SlotCache(BaseSlotCache):
    """Keys and values as [slot, position, kv head, dim] per layer. One slot more than asked for takes the writes of
    padding rows. States have a row for each slot, and one for each as they were before its prompt's last token."""

    def __init__(
        self, shape: CacheShape, slots: int, length: int, max_length: int, dtype: torch.dtype, device: str,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        self._shape, self._dtype, self.device = shape, dtype, torch.device(device)
        self.keeps_states = bool(shape.states)
        self.states: dict[int, States] = {}
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        super().__init__(slots, length, max_length, deterministic)

    def wake(self) -> None:
        for number, layer in self._shape.attention.items():
            self.keys[number], self.values[number] = (
                torch.zeros(self.slots + 1, self.length, layer.kv_heads, dim, dtype=self._dtype, device=self.device)
                for dim in (layer.key_dim, layer.value_dim)
            )
        for number, states in self._shape.states.items():
            self.states[number] = {
                name: one.new_zeros(2 * (self.slots + 1), *one.shape[1:], device=self.device)
                for name, one in states.items()
            }

    def _free_memory(self) -> None:
        self.keys, self.values, self.states = {}, {}, {}

    def _copy_slot(self, source: int, length: int, targets: Sequence[int]) -> None:
        slots = torch.tensor(targets, device=self.device)
        for layer in (*self.keys.values(), *self.values.values()):
            layer[slots, :length] = layer[source, :length]
        for states in self._all_states():
            states[slots] = states[self._at_prompt(slots)] = states[self._at_prompt(source)].clone()

    def _zero_slot(self, slot: int) -> None:
        for layer in (*self.keys.values(), *self.values.values()):
            layer[slot].zero_()
        for states in self._all_states():
            states[[slot, self._at_prompt(slot)]] = 0

    def _all_states(self) -> Iterator[Tensor]:
        return (one for states in self.states.values() for one in states.values())

    def _at_prompt(self, slots: IntOrTensor) -> IntOrTensor:
        """The rows of states as they were before the last token of the prompts in these slots."""
        return slots + self.slots + 1

    def keep_prompt_states(self, chunks: Iterable[Chunk]) -> None:
        """Remember states that stand, after these chunks, before the last token of a prompt."""
        slots = [c.sequence.slot for c in chunks if c.start + c.length == len(c.sequence.request.prompt_ids) - 1]
        if slots:
            rows = torch.tensor(slots, device=self.device)
            for states in self._all_states():
                states[self._at_prompt(rows)] = states[rows]

    def read_states(self, layer: int, slots: Tensor) -> States:
        return {name: states[slots] for name, states in self.states[layer].items()}

    def write_states(self, layer: int, slots: Tensor, states: States) -> None:
        for name, rows in states.items():
            self.states[layer][name][slots] = rows

    def reset_states(self, chunks: Iterable[Chunk]) -> None:
        """Empty the states of the sequences that begin with one of these chunks."""
        slots = [c.sequence.slot for c in chunks if c.start == 0]
        if slots:
            rows = torch.tensor(slots, device=self.device)
            for states in self._all_states():
                states[rows] = 0

    def _resize(self, length: int) -> None:
        for store in (self.keys, self.values):
            for layer, old in store.items():
                store[layer] = F.pad(old, (0, 0, 0, 0, 0, length - old.shape[1]))

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        keys, values = self.keys[layer], self.values[layer]
        if native.has_kernel(keys, values, keys.shape[2]):
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
