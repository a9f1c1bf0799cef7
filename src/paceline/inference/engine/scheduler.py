"""Which tokens the next step computes: continuous batching, shared prompts, weight swaps.

    waiting -> running (prefill -> decode) -> finished

A step is a list of chunks, each some tokens of one sequence whose keys and values are not in the cache yet. A decoding
sequence contributes its last token; a new one its prompt, in pieces if it is long. The last token of a sequence, and
only that, is sampled from.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from paceline.inference.base import Completion, Finish, GenerateRequest
from paceline.inference.engine.cache import SlotCache


@dataclass(eq=False, slots=True)
class Sequence:
    """A request on its way through the engine."""

    request: GenerateRequest
    future: "Future[Completion]"
    tokens: list[int]
    limit: int
    """Most tokens it may grow to, prompt included."""
    slot: int = -1
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    logprobs: list[float] = field(default_factory=list)
    log_z: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prompt_key: tuple[int, tuple[int, ...]] | None = None
    recomputed: bool = False

    @property
    def sampled(self) -> int:
        return len(self.versions)

    @property
    def pending(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    def append(self, token: int, logprob: float, log_z: float | None, version: int) -> Finish | None:
        """Take one sampled token; tells how the sequence ended, if it did."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if log_z is not None:
            self.log_z.append(log_z)
        if token in self.request.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def completion(self, finish: Finish) -> Completion:
        return Completion(
            token_ids=self.tokens[len(self.request.prompt_ids) :],
            logprobs=self.logprobs,
            versions=self.versions,
            finish=finish,
            log_z=self.log_z or None,
            recomputed=self.recomputed,
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `start + length` of a sequence, and whether the token after them is sampled."""

    sequence: Sequence
    start: int
    length: int
    samples: bool


class Scheduler:
    """Decides what runs; owns the slots. Plain bookkeeping, no tensors but the prefix copies it asks the cache for."""

    def __init__(self, cache: SlotCache, prefill_tokens: int, deterministic: bool = False) -> None:
        self.running: dict[int, Sequence] = {}
        self.version = 0
        self._cache = cache
        self._prefill_tokens = prefill_tokens
        self._deterministic = deterministic
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._arrivals = 0
        self._free = list(range(cache.slots))
        self._copies: dict[tuple[int, int], list[int]] = defaultdict(list)
        """Prompts to copy before the next step: (source slot, length) to target slots."""
        self._prompts: dict[tuple[int, tuple[int, ...]], Sequence] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a request: by its order, then by arrival."""
        heapq.heappush(self._waiting, (sequence.request.order, self._arrivals, sequence))
        self._arrivals += 1

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step; empty when there is nothing to do."""
        chunks: list[Chunk] = []
        budget = self._prefill_tokens
        for sequence in self.running.values():
            budget -= self._take(sequence, budget, chunks)
        held: list[tuple[int, int, Sequence]] = []
        while self._waiting and self._free and budget > 0:
            entry = heapq.heappop(self._waiting)
            if entry[2].future.cancelled():
                continue
            if self._admit(entry[2]):
                budget -= self._take(entry[2], budget, chunks)
            else:
                held.append(entry)
        for entry in held:
            heapq.heappush(self._waiting, entry)
        for (source, length), targets in self._copies.items():
            self._cache.copy_prefix(source, targets, length)
        self._copies.clear()
        return chunks

    def _take(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Add the sequence's next chunk. Answers what it cost of the prefill budget; decoding is free."""
        pending = sequence.pending
        if pending == 1:
            chunks.append(Chunk(sequence, sequence.computed, 1, samples=True))
            return 0
        if self._deterministic:
            # Every sampled token comes from a decode step, so all see the same shapes, whoever computed the prompt.
            chunks.append(Chunk(sequence, sequence.computed, pending - 1, samples=False))
            return 0
        length = min(pending, budget)
        if length > 0:
            chunks.append(Chunk(sequence, sequence.computed, length, samples=length == pending))
        return max(length, 0)

    def _admit(self, sequence: Sequence) -> bool:
        """Give it a slot. False: another sequence is computing the same prompt just now, better wait and copy it."""
        prompt = sequence.request.prompt_ids
        key = (self.version, prompt)
        source = self._prompts.get(key)
        if source is not None and source.computed < len(prompt) - 1:
            return False
        sequence.slot = heapq.heappop(self._free)
        self.running[sequence.slot] = sequence
        self._cache.ensure(sequence.limit)
        sequence.prompt_key = key
        if source is not None and len(prompt) > 1:
            self._copies[source.slot, len(prompt) - 1].append(sequence.slot)
            sequence.computed = len(prompt) - 1
        else:
            self._prompts[key] = sequence
        return True

    def advance(self, chunk: Chunk) -> None:
        """The chunk's keys and values are in the cache now."""
        chunk.sequence.computed = chunk.start + chunk.length

    def release(self, sequence: Sequence) -> None:
        """Free its slot, finished or not."""
        del self.running[sequence.slot]
        heapq.heappush(self._free, sequence.slot)
        self._forget_prompt(sequence)

    def swap(self, version: int, recompute: bool) -> None:
        """New weights: prompts of older versions are never shared again; running caches are kept or computed anew."""
        self.version = version
        self._prompts.clear()
        if recompute:
            for sequence in self.running.values():
                sequence.recomputed = sequence.recomputed or sequence.computed > 0
                sequence.computed = 0

    def drain(self) -> Iterable[Sequence]:
        """Take everything out, for shutting down."""
        everything = [*self.running.values(), *(entry[2] for entry in self._waiting)]
        for sequence in list(self.running.values()):
            self.release(sequence)
        self._waiting.clear()
        return everything

    def _forget_prompt(self, sequence: Sequence) -> None:
        if sequence.prompt_key and self._prompts.get(sequence.prompt_key) is sequence:
            del self._prompts[sequence.prompt_key]
