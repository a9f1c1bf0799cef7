"""The KV cache: what the scheduler asks of it, and the bookkeeping of one slot per running request.

A slot is one row of memory: a decode step reads it in place, without gathering. On CUDA `pages.py` is used instead.
"""

import heapq
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence

from paceline.engine.sequence import DecodeSequence
from paceline.engine.weight_applier import WeightsKey


class KVCache(ABC):
    """Holds keys and values. All bookkeeping is in launch order: what a launched step writes counts as there."""

    shares_within_step: bool
    """Whether a prompt can be shared in the very step that computes it."""
    keeps_states = False
    """Whether layers carry states, which stand at one token: a prompt is computed up to its last token, where its
    states are kept for others."""

    def __init__(self, slots: int, max_length: int, deterministic: bool) -> None:
        self.slots, self.max_length, self._deterministic = slots, max_length, deterministic

    @property
    def scratch(self) -> int:
        """The slot that takes the writes of padding and is never read."""
        return self.slots

    @property
    @abstractmethod
    def usage(self) -> float:
        """Part of the cache in use, 0 to 1."""

    def fits(self, length: int) -> bool:
        """Whether a sequence of this length can ever run."""
        return length <= self.max_length

    @abstractmethod
    def admit(self, sequence: DecodeSequence, running: int) -> bool:
        """Give it a slot and whatever of its tokens is already there (`num_computed`); False when there is no room."""

    @abstractmethod
    def grow(self, sequence: DecodeSequence, length: int) -> bool:
        """Room for `length` tokens of a running sequence; False when the memory is used up."""

    def flush_copies(self) -> None:  # noqa: B027 - pages leave nothing to do
        """Copy the slots that admissions share; called before a step."""

    @abstractmethod
    def register_prefix(self, sequence: DecodeSequence) -> None:
        """Make the computed tokens of a sequence available for sharing."""

    @abstractmethod
    def release(self, sequence: DecodeSequence) -> None:
        """Take its place back; what it computed may be shared until it is overwritten."""

    @abstractmethod
    def scrub(self, sequence: DecodeSequence) -> None:
        """Overwrite what it wrote, before its place is released."""

    @abstractmethod
    def reset_prefixes(self) -> None:
        """Share nothing computed so far: the weights changed."""

    def sleep(self) -> None:
        """Give the memory back. Nothing may be running."""
        self.reset_prefixes()
        self._free_memory()

    @abstractmethod
    def wake(self) -> None:
        """Take the memory, empty."""

    @abstractmethod
    def _free_memory(self) -> None:
        """Give the memory back."""


class BaseSlotCache(KVCache):
    """Assigns slots, and finds keys and values that another sequence may share. The memory is a subclass's.

    The length grows by doubling up to `max_length`, so short conversations never pay for the model's whole context.
    With `deterministic`, only prompts are shared, because keys from a decode step may differ from those of a prompt by
    rounding.
    """

    shares_within_step = False  # a slot is copied before the step that fills it

    def __init__(self, slots: int, length: int, max_length: int, deterministic: bool = False) -> None:
        super().__init__(slots, max_length, deterministic)
        self.length = length
        self._free = list(range(slots))
        self._freed_tokens: dict[int, tuple[WeightsKey, list[int]]] = {}
        """Tokens a freed slot still holds, for the next turn of the same conversation."""
        self._prompts: dict[tuple[WeightsKey, tuple[int, ...]], int] = {}
        """Running slots by their prompt, for the other members of a group."""
        self._owners: dict[int, tuple[WeightsKey, tuple[int, ...]]] = {}
        self._copies: dict[tuple[int, int], list[int]] = defaultdict(list)
        """To copy before the next step: (source slot, length) to target slots."""
        self.wake()

    @abstractmethod
    def _copy_slot(self, source: int, length: int, targets: Sequence[int]) -> None:
        """The first positions of a slot, to others."""

    @abstractmethod
    def _zero_slot(self, slot: int) -> None:
        """Zero a slot."""

    @abstractmethod
    def _resize(self, length: int) -> None:
        """Room for `length` positions in every slot; what is there stays."""

    @property
    def usage(self) -> float:
        return 1 - len(self._free) / self.slots

    def admit(self, sequence: DecodeSequence, running: int) -> bool:
        if not self._free:
            return False
        assert sequence.weights_key is not None
        tokens = sequence.tokens
        left, shared = self._find_prefix(sequence)
        source = self._prompts.get((sequence.weights_key, tuple(tokens))) if sequence.scores is None else None
        if source is not None and shared < len(tokens) - 1:
            sequence.slot = heapq.heappop(self._free)
            sequence.num_computed = len(tokens) - 1
            self._copies[source, sequence.num_computed].append(sequence.slot)
        elif left is not None:
            sequence.slot = left
            self._free.remove(left)
            heapq.heapify(self._free)
            sequence.num_computed = shared
        else:
            sequence.slot = heapq.heappop(self._free)
        self._freed_tokens.pop(sequence.slot, None)
        self._reserve(len(tokens))
        return True

    def _find_prefix(self, sequence: DecodeSequence) -> tuple[int | None, int]:
        """The free slot that holds most of this prompt's beginning, and how many tokens of it."""
        best, most = None, 0
        if self._deterministic or sequence.scores is not None:
            return best, most
        for slot, (weights_key, tokens) in self._freed_tokens.items():
            shared = min(len(tokens), len(sequence.tokens) - 1)
            if self.keeps_states and not shared == len(tokens) < len(sequence.request.prompt_ids) - 1:
                continue  # its states have gone further, or the prompt would pass by the place where others begin
            if shared > most and weights_key == sequence.weights_key and tokens[:shared] == sequence.tokens[:shared]:
                best, most = slot, shared
        return best, most

    def grow(self, sequence: DecodeSequence, length: int) -> bool:
        """Only as far as it has come: a request may ask for the model's whole context and say one word."""
        self._reserve(length)
        return True

    def flush_copies(self) -> None:
        for (source, length), targets in self._copies.items():
            self._copy_slot(source, length, targets)
        self._copies.clear()

    def register_prefix(self, sequence: DecodeSequence) -> None:
        prompt = sequence.request.prompt_ids
        if sequence.weights_key is None or sequence.slot in self._owners or sequence.num_computed < len(prompt) - 1:
            return
        key = (sequence.weights_key, prompt)
        if key not in self._prompts:
            self._prompts[key] = sequence.slot
            self._owners[sequence.slot] = key

    def release(self, sequence: DecodeSequence) -> None:
        slot = sequence.slot
        if key := self._owners.pop(slot, None):
            del self._prompts[key]
        # Where steps run ahead, states may have gone past the tokens that count.
        is_ahead = self.keeps_states and sequence.num_computed > len(sequence.tokens)
        if sequence.weights_key is not None and sequence.num_computed > 1 and not is_ahead:
            self._freed_tokens[slot] = (sequence.weights_key, sequence.tokens[: sequence.num_computed])
        heapq.heappush(self._free, slot)

    def scrub(self, sequence: DecodeSequence) -> None:
        sequence.weights_key = None
        self._zero_slot(sequence.slot)

    def reset_prefixes(self) -> None:
        self._freed_tokens.clear()
        self._prompts.clear()
        self._owners.clear()

    def _reserve(self, length: int) -> None:
        if length > self.length:
            self.length = min(self.max_length, max(length, 2 * self.length))
            self._resize(self.length)
