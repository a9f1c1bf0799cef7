"""The KV cache: what the scheduler asks of one, and the slots that serve a CPU.

A slot is one row of memory per running request: a decode step reads it in place, without gathering. On CUDA `pages.py`
takes its stead.
"""

import heapq
from collections import defaultdict
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.inference.engine.sequence import Family, Sequence
from paceline.model.native import attention as native
from paceline.model.shape import AttentionShape


class Cache(Protocol):
    """Where keys and values live. All bookkeeping is in launch order: what a launched step writes counts as there."""

    slots: int
    shares_at_once: bool
    """Whether a prompt can be shared in the very step that computes it."""

    def fits(self, length: int) -> bool:
        """Whether a sequence of this length can ever run."""
        ...

    def admit(self, sequence: Sequence, running: int) -> bool:
        """Give it a slot and whatever of its tokens is already there (`computed`); False when there is no room."""
        ...

    def grow(self, sequence: Sequence, length: int) -> bool:
        """Room for `length` tokens of a running sequence; False when the memory is used up."""
        ...

    def settle(self) -> None:
        """Before a step: carry out what admissions left to do."""
        ...

    def advance(self, sequence: Sequence) -> None:
        """More of its tokens are computed."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Take its place back; what it computed may be shared until it is overwritten."""
        ...

    def scrub(self, sequence: Sequence) -> None:
        """Overwrite what it wrote, before its place is released."""
        ...

    def forget(self) -> None:
        """The weights changed: nothing computed so far is ever shared again."""
        ...

    def sleep(self) -> None:
        """Give the memory back. Nothing may be running."""
        ...

    def wake(self) -> None: ...

    @property
    def used(self) -> float: ...


class SlotCache:
    """Keys and values as [slot, position, kv head, dim] per layer.

    One slot more than asked for takes the writes of padding rows. The length grows by doubling up to `max_length`, so
    short conversations never pay for the model's whole context. With `steady`, only prompts are shared, because keys
    from a decode step may differ from those of a prompt by rounding.
    """

    shares_at_once = False  # a slot is copied before the step that fills it

    def __init__(
        self, shape: AttentionShape, slots: int, length: int, max_length: int, dtype: torch.dtype, device: str,
        steady: bool = False,
    ) -> None:  # fmt: skip
        self.slots, self.length, self.max_length = slots, length, max_length
        self._shape, self._dtype, self._device, self._steady = shape, dtype, device, steady
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.wake()
        self._free = list(range(slots))
        self._left: dict[int, tuple[Family, list[int]]] = {}
        """What a freed slot still holds, for the next turn of the same conversation."""
        self._prompts: dict[tuple[Family, tuple[int, ...]], int] = {}
        """Running slots by their prompt, for the other members of a group."""
        self._owners: dict[int, tuple[Family, tuple[int, ...]]] = {}
        self._copies: dict[tuple[int, int], list[int]] = defaultdict(list)
        """To copy before the next step: (source slot, length) to target slots."""

    @property
    def scratch(self) -> int:
        """The slot nobody reads."""
        return self.slots

    @property
    def device(self) -> torch.device:
        return torch.device(self._device)

    @property
    def used(self) -> float:
        return 1 - len(self._free) / self.slots

    def wake(self) -> None:
        """Take the memory, empty."""
        shape = (self.slots + 1, self.length, self._shape.kv_heads, self._shape.head_dim)
        self.keys, self.values = (
            [torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in range(self._shape.layers)]
            for _ in range(2)
        )

    def sleep(self) -> None:
        """Give the memory back."""
        self.forget()
        self.keys, self.values = [], []

    def fits(self, length: int) -> bool:
        return length <= self.max_length

    def admit(self, sequence: Sequence, running: int) -> bool:
        if not self._free:
            return False
        assert sequence.family is not None
        tokens = sequence.tokens
        left, shared = self._continued(sequence)
        source = self._prompts.get((sequence.family, tuple(tokens))) if sequence.scores is None else None
        if source is not None and shared < len(tokens) - 1:
            sequence.slot = heapq.heappop(self._free)
            sequence.computed = len(tokens) - 1
            self._copies[source, sequence.computed].append(sequence.slot)
        elif left is not None:
            sequence.slot = left
            self._free.remove(left)
            heapq.heapify(self._free)
            sequence.computed = shared
        else:
            sequence.slot = heapq.heappop(self._free)
        self._left.pop(sequence.slot, None)
        self._ensure(sequence.limit)
        return True

    def _continued(self, sequence: Sequence) -> tuple[int | None, int]:
        """The free slot that holds most of this prompt's beginning, and how many tokens of it."""
        best, most = None, 0
        if self._steady or sequence.scores is not None:
            return best, most
        for slot, (family, tokens) in self._left.items():
            shared = min(len(tokens), len(sequence.tokens) - 1)
            if shared > most and family == sequence.family and tokens[:shared] == sequence.tokens[:shared]:
                best, most = slot, shared
        return best, most

    def grow(self, sequence: Sequence, length: int) -> bool:
        return True

    def settle(self) -> None:
        for (source, length), targets in self._copies.items():
            slots = torch.tensor(targets, device=self._device)
            for store in (self.keys, self.values):
                for layer in store:
                    layer[slots, :length] = layer[source, :length]
        self._copies.clear()

    def advance(self, sequence: Sequence) -> None:
        prompt = sequence.request.prompt_ids
        if sequence.family is None or sequence.slot in self._owners or sequence.computed < len(prompt) - 1:
            return
        key = (sequence.family, prompt)
        if key not in self._prompts:
            self._prompts[key] = sequence.slot
            self._owners[sequence.slot] = key

    def release(self, sequence: Sequence) -> None:
        slot = sequence.slot
        if key := self._owners.pop(slot, None):
            del self._prompts[key]
        if sequence.family is not None and sequence.computed > 1:
            self._left[slot] = (sequence.family, sequence.tokens[: sequence.computed])
        heapq.heappush(self._free, slot)

    def scrub(self, sequence: Sequence) -> None:
        sequence.family = None
        for store in (*self.keys, *self.values):
            store[sequence.slot].zero_()

    def forget(self) -> None:
        self._left.clear()
        self._prompts.clear()
        self._owners.clear()

    def _ensure(self, length: int) -> None:
        """Room for `length` positions in every slot."""
        if length <= self.length:
            return
        self.length = min(self.max_length, max(length, 2 * self.length))
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                store[layer] = F.pad(old, (0, 0, 0, 0, 0, self.length - old.shape[1]))

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        keys, values = self.keys[layer], self.values[layer]
        if native.serves(keys, keys.shape[2]):
            native.keep(keys, values, k, v, slots, positions)
        else:
            keys[slots, positions] = k
            values[slots, positions] = v

    def whole(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer], self.values[layer]

    def read(self, layer: int, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots 0 to `rows`, in place: [rows, width, kv heads, dim]."""
        return self.keys[layer][:rows, :width], self.values[layer][:rows, :width]

    def read_one(self, layer: int, slot: int, width: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer][slot : slot + 1, :width], self.values[layer][slot : slot + 1, :width]
