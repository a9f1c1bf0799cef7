"""The paged KV cache: small pages, shared by reference between requests with a common prefix.

    free -> held by n sequences -> evictable (unused, but still found by its content) -> free

A page is found by exact content: a node is (parent node, tokens of the page), its root the key of the weights,
that is the model and version the keys were computed with. So a prefix of older weights can never be found again.
"""

from collections import OrderedDict, deque
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.engine.kv_cache import KVCache
from paceline.engine.sequence import DecodeSequence
from paceline.engine.weight_applier import WeightsKey
from paceline.model.support import AttentionShape

PAGE = 16
SCRATCH_PAGE = 0
"""The page that takes the writes of padding rows."""


class PageMemory(Protocol):
    """Source of the pages: plain tensors, or memory that can be lent out while its address stays."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class PrefixIndex:
    """Maps beginnings to the pages that hold them, and lists those no sequence uses just now, oldest first."""

    def __init__(self) -> None:
        self._pages: dict[tuple[object, tuple[int, ...]], tuple[int, int]] = {}
        """(parent node or weights_key, tokens) to (node, page)."""
        self._keys: dict[int, tuple[object, tuple[int, ...]]] = {}
        """Page to its key above."""
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self._nodes = 0

    def find(self, weights_key: WeightsKey, tokens: list[int]) -> list[tuple[int, int]]:
        """(node, page) of the longest known beginning of `tokens`, never all of them: one is left to sample from."""
        found: list[tuple[int, int]] = []
        parent: object = weights_key
        for end in range(PAGE, len(tokens), PAGE):
            entry = self._pages.get((parent, tuple(tokens[end - PAGE : end])))
            if entry is None:
                break
            found.append(entry)
            parent = entry[0]
        return found

    def add(self, parent: object, tokens: tuple[int, ...], page: int) -> int:
        """Make a page findable; answers with its node, or that of a page with the same content."""
        known = self._pages.get((parent, tokens))
        if known is not None:
            return known[0]
        self._nodes += 1
        self._pages[parent, tokens] = (self._nodes, page)
        self._keys[page] = (parent, tokens)
        return self._nodes

    def mark_evictable(self, page: int) -> bool:
        """Keep an unused page findable until it is evicted. False: it is not in the index."""
        if page not in self._keys:
            return False
        self.evictable[page] = None
        return True

    def evict_oldest(self) -> int:
        page, _ = self.evictable.popitem(last=False)
        del self._pages[self._keys.pop(page)]
        return page

    def clear(self) -> list[int]:
        """Forget everything; answers with the pages that no sequence uses."""
        kept = list(self.evictable)
        self._pages.clear()
        self._keys.clear()
        self.evictable.clear()
        return kept


class PageCache(KVCache):
    """Slots name running sequences; a table says which pages hold their tokens.

    With `deterministic`, nothing is shared and a sequence gets all its pages at once, so that none is ever preempted:
    what a request computes then depends on the request alone.
    """

    shares_within_step = True  # a step writes all its keys before it reads any

    def __init__(
        self, shape: AttentionShape, slots: int, pages: int, max_length: int, dtype: torch.dtype, memory: PageMemory,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(slots, max_length, deterministic)
        self.pages, self._memory = pages, memory
        sizes = [(pages + 1) * PAGE * layer.numbers for layer in shape.values()]
        self._kv = memory.allocate((sum(sizes),), dtype)
        self.keys: dict[int, Tensor] = {}
        """[pages, kv heads, page, dim] of each layer that attends; the values likewise."""
        self.values: dict[int, Tensor] = {}
        for (number, layer), part in zip(shape.items(), self._kv.split(sizes), strict=True):
            keys = (pages + 1) * PAGE * layer.kv_heads * layer.key_dim
            self.keys[number] = part[:keys].view(pages + 1, layer.kv_heads, PAGE, layer.key_dim)
            self.values[number] = part[keys:].view(pages + 1, layer.kv_heads, PAGE, layer.value_dim)
        self.columns = -(-max_length // PAGE)
        self.table = np.zeros((slots + 1, self.columns), np.int32)
        self.table_changes: dict[tuple[int, int], int] = {}
        """(slot, column) to page, since the runner last looked."""
        self._free = deque(range(1, pages + 1))
        self._ref_counts = [0] * (pages + 1)
        self._free_slots = list(range(slots - 1, -1, -1))
        self._prefixes = PrefixIndex()

    @property
    def device(self) -> torch.device:
        return self._kv.device

    @property
    def available_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free) + len(self._prefixes.evictable)

    @property
    def usage(self) -> float:
        return 1 - self.available_pages / self.pages

    def _free_memory(self) -> None:
        self._memory.sleep()

    def wake(self) -> None:
        self._memory.wake()

    def fits(self, length: int) -> bool:
        return super().fits(length) and -(-length // PAGE) <= self.pages

    def admit(self, sequence: DecodeSequence, running: int) -> bool:
        """Room for its tokens and, so that those who run can go on for a while, a page for each of them."""
        if not self._free_slots:
            return False
        assert sequence.weights_key is not None
        alone = self._deterministic or sequence.scores is not None
        shared = [] if alone else self._prefixes.find(sequence.weights_key, sequence.tokens)
        unheld = sum(1 for _, page in shared if not self._ref_counts[page])
        room = self.available_pages - unheld
        first = sequence.limit if self._deterministic else min(len(sequence.tokens) + 1, sequence.limit)
        needed = -(-first // PAGE) - len(shared)
        if needed + (0 if self._deterministic else running) > room and (running or needed > room):
            return False
        sequence.slot = self._free_slots.pop()
        for node, page in shared:
            self._prefixes.evictable.pop(page, None)
            self._ref_counts[page] += 1
            self._append_page(sequence, page)
            sequence.nodes.append(node)
        sequence.num_computed = len(shared) * PAGE
        if self._deterministic:
            self.grow(sequence, sequence.limit)
        return True

    def grow(self, sequence: DecodeSequence, length: int) -> bool:
        while len(sequence.pages) * PAGE < length:
            if not self.available_pages:
                return False
            page = self._free.popleft() if self._free else self._prefixes.evict_oldest()
            self._ref_counts[page] = 1
            self._append_page(sequence, page)
        return True

    def register_prefix(self, sequence: DecodeSequence) -> None:
        """Pages that are full, and whose tokens the host has seen, can be shared from now on."""
        if sequence.weights_key is None or self._deterministic:
            return
        full = min(sequence.num_computed, len(sequence.tokens)) // PAGE
        for column in range(len(sequence.nodes), full):
            parent: object = sequence.nodes[-1] if sequence.nodes else sequence.weights_key
            tokens = tuple(sequence.tokens[column * PAGE : (column + 1) * PAGE])
            sequence.nodes.append(self._prefixes.add(parent, tokens, sequence.pages[column]))

    def release(self, sequence: DecodeSequence) -> None:
        self.register_prefix(sequence)
        # Last pages first, so that the beginning of a conversation is the last to be dropped.
        for page in reversed(sequence.pages):
            self._ref_counts[page] -= 1
            if not self._ref_counts[page] and not self._prefixes.mark_evictable(page):
                self._free.append(page)
        sequence.pages.clear()
        sequence.nodes.clear()
        self._free_slots.append(sequence.slot)

    def scrub(self, sequence: DecodeSequence) -> None:
        sequence.weights_key = None
        own = [page for page in sequence.pages if self._ref_counts[page] == 1]
        pages = torch.tensor([SCRATCH_PAGE, *own], device=self.device)
        for layer in (*self.keys.values(), *self.values.values()):
            layer[pages] = 0

    def reset_prefixes(self) -> None:
        self._free.extend(self._prefixes.clear())

    def _append_page(self, sequence: DecodeSequence, page: int) -> None:
        column = len(sequence.pages)
        sequence.pages.append(page)
        self.table[sequence.slot, column] = page
        self.table_changes[sequence.slot, column] = page

    # -- reading and writing in plain torch, for CPUs and for tests --------------------------------------------------

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        self.table_changes.clear()  # the table is read right here
        pages = torch.from_numpy(self.table)[slots, positions // PAGE].long()
        self.keys[layer][pages, :, positions % PAGE] = k
        self.values[layer][pages, :, positions % PAGE] = v

    def read(self, layer: int, slots: slice, width: int) -> tuple[Tensor, Tensor]:
        pages = torch.from_numpy(self.table)[slots, : -(-width // PAGE)].long()
        stores = self.keys[layer], self.values[layer]
        keys, values = (store[pages].transpose(2, 3).flatten(1, 2)[:, :width] for store in stores)
        return keys, values
