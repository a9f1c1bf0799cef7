"""Chooses the tokens of the next step: continuous batching, shared prompts, preemption, weight updates.

    waiting -> running (prefill -> decode) -> leaving -> finished
       ^                                         |
       +------------- preempted -----------------+

A step is a list of chunks, each some tokens of one sequence whose keys and values are not in the cache yet. A decoding
sequence contributes its last token; a new one its prompt, in pieces if it is long. The last token of a sequence, and
only that, is sampled from. Steps are scheduled before earlier ones have landed, so everything here counts in launch
order; a sequence that is done leaves only when no launched step can write to its place any more.
"""

import heapq
import time
from collections.abc import Iterable

from paceline.engine.kv_cache import KVCache
from paceline.engine.sequence import Chunk, DecodeSequence
from paceline.engine.weight_applier import ServedModels, WeightsKey


class Scheduler:
    """Decides what runs. Plain bookkeeping, no tensors."""

    def __init__(
        self,
        cache: KVCache,
        prefill_tokens: int,
        deterministic: bool = False,
        served: ServedModels | None = None,
    ) -> None:
        self.running: dict[int, DecodeSequence] = {}
        """By slot, in order of admission."""
        self._served = served or ServedModels()
        self.num_preempted = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._cache = cache
        self._prefill_tokens = prefill_tokens
        self._deterministic = deterministic
        self._waiting: list[tuple[int, int, int, DecodeSequence]] = []
        self._arrivals = 0
        self._queue_round = 0
        """The latest round that was admitted: a call that comes now begins there."""
        self._leaving: set[DecodeSequence] = set()
        """Sequences out of the running ones that launched steps still write for."""
        self._prefixes_in_progress: dict[tuple[WeightsKey, tuple[int, ...]], DecodeSequence] = {}
        """Sequences that compute a prompt which others may soon share."""
        self._step_prompts: set[tuple[WeightsKey | None, tuple[int, ...]]] = set()
        """Prompts that the step being put together computes."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self.running and not self._waiting and not self._leaving

    def add(self, sequence: DecodeSequence) -> None:
        """Queue a request: by its order, then by its queue round, then by arrival."""
        sequence.arrival, sequence.queue_round = self._arrivals, self._queue_round + sequence.request.queue_round
        self._arrivals += 1
        self._push_waiting(sequence)

    def _push_waiting(self, sequence: DecodeSequence) -> None:
        heapq.heappush(self._waiting, (sequence.request.order, sequence.queue_round, sequence.arrival, sequence))

    # -- before a step ------------------------------------------------------------------------------------------------

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, counted as launched; empty when there is nothing to do."""
        chunks: list[Chunk] = []
        budget = self._prefill_tokens
        self._step_prompts.clear()
        for sequence in list(self.running.values()):
            if sequence.slot in self.running:  # not preempted by one before it
                budget -= self._schedule_next(sequence, budget, chunks)
        self._admit_waiting(budget, chunks)
        self._cache.flush_copies()
        return chunks

    def _admit_waiting(self, budget: int, chunks: list[Chunk]) -> None:
        deferred: list[DecodeSequence] = []
        while self._waiting and budget > 0:
            sequence = self._waiting[0][-1]
            if sequence.future.cancelled():
                heapq.heappop(self._waiting)
                continue
            sequence.weights_key = self._served.weights_key(sequence.request.model)
            if self._is_prompt_computing(sequence):
                deferred.append(heapq.heappop(self._waiting)[-1])
                continue
            if not self._cache.admit(sequence, len(self.running)):
                break
            heapq.heappop(self._waiting)
            self._start_running(sequence)
            budget -= self._schedule_next(sequence, budget, chunks)
        for sequence in deferred:
            self._push_waiting(sequence)

    def _is_prompt_computing(self, sequence: DecodeSequence) -> bool:
        """Another sequence is computing the same prompt just now: better wait a step and share it. What is computed in
        this very step must not be copied before it, even where the owner is not the one that computes it."""
        assert sequence.weights_key is not None
        prompt = (sequence.weights_key, sequence.request.prompt_ids)
        if sequence.scores is not None:
            return False
        own = (sequence.weights_key, tuple(sequence.tokens))
        if not self._cache.shares_within_step and {prompt, own} & self._step_prompts:
            return True
        owner = self._prefixes_in_progress.get(prompt)
        return owner is not None and owner.num_computed < len(sequence.request.prompt_ids) - 1

    def _start_running(self, sequence: DecodeSequence) -> None:
        self._queue_round = max(self._queue_round, sequence.queue_round)
        self.running[sequence.slot] = sequence
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            sequence.queued = time.perf_counter() - sequence.submitted
            self.prompt_tokens += len(sequence.tokens)
            self.cached_tokens += sequence.num_computed
        # What it once computed itself was never shared.
        sequence.num_cached = min(sequence.num_cached, sequence.num_computed)
        assert sequence.weights_key is not None
        self._prefixes_in_progress.setdefault((sequence.weights_key, sequence.request.prompt_ids), sequence)

    def _schedule_next(self, sequence: DecodeSequence, budget: int, chunks: list[Chunk]) -> int:
        """Add the sequence's next chunk. Answers what it cost of the prefill budget; decoding is free."""
        length = len(sequence.tokens) + sequence.pending_tokens
        if sequence.pending_tokens and (length >= sequence.limit or sequence.matcher is not None):
            return 0  # nothing more to sample, or not before the host has seen the last token
        pending = length - sequence.num_computed
        if pending == 1 and sequence.scores is None:
            self._launch(sequence, 1, True, chunks)
            return 0
        samples_token = sequence.scores is None
        length = min(pending, budget)
        if self._deterministic:
            # Every sampled token comes from a decode step, so all see the same shapes, even where a prompt is shared.
            length = min(pending - samples_token, self._prefill_tokens)
        before_last = len(sequence.request.prompt_ids) - 1 - sequence.num_computed
        if self._cache.keeps_states and before_last > 0:
            length = min(length, before_last)
        if length <= 0:
            return 0
        return self._launch(sequence, length, samples_token and length == pending, chunks)

    def _launch(self, sequence: DecodeSequence, length: int, samples_token: bool, chunks: list[Chunk]) -> int:
        while not self._cache.grow(sequence, sequence.num_computed + length):
            if any(leaving.is_preempted for leaving in self._leaving):
                return 0  # pages are on their way back
            victim = next(reversed(self.running.values()))
            self.num_preempted += 1
            self.preempt([victim])  # gives its pages to others; it waits again and recomputes what it had
            if victim is sequence:
                return 0
        request, served = sequence.request, self._served
        start, model, prompt = sequence.num_computed, request.model, len(request.prompt_ids)
        index = len(sequence.tokens) + sequence.pending_tokens - prompt
        chunks.append(
            Chunk(
                sequence,
                start,
                length,
                samples_token,
                served.versions[model],
                served.adapter_slots[model],
                index,
            )
        )
        sequence.num_computed += length
        sequence.pending_steps += 1
        sequence.pending_tokens += samples_token
        if start < prompt - 1:  # all but its last token are what others share
            self._step_prompts.add((sequence.weights_key, request.prompt_ids))
        if start < prompt:
            self._cache.register_prefix(sequence)
        return length

    # -- after a step -------------------------------------------------------------------------------------------------

    def land(self, chunk: Chunk) -> None:
        """The host has what this chunk computed."""
        sequence = chunk.sequence
        sequence.pending_steps -= 1
        sequence.pending_tokens -= chunk.samples_token
        if sequence in self._leaving and not sequence.pending_steps:
            self._finish_leaving(sequence)

    def release(self, sequence: DecodeSequence) -> None:
        """Schedule nothing more of this sequence; its slot is freed once no launched step writes there."""
        sequence.is_preempted = False
        if self.running.pop(sequence.slot, None) is None and sequence not in self._leaving:
            return
        self._start_leaving(sequence)

    def _start_leaving(self, sequence: DecodeSequence) -> None:
        if sequence.weights_key is not None:
            prompt = (sequence.weights_key, sequence.request.prompt_ids)
            if self._prefixes_in_progress.get(prompt) is sequence:
                del self._prefixes_in_progress[prompt]
        self._leaving.add(sequence)
        if not sequence.pending_steps:
            self._finish_leaving(sequence)

    def _finish_leaving(self, sequence: DecodeSequence) -> None:
        self._leaving.discard(sequence)
        if sequence.may_hold_nan:
            self._cache.scrub(sequence)
        self._cache.release(sequence)
        sequence.slot, sequence.num_computed = -1, 0
        if sequence.is_preempted:
            sequence.is_preempted = False
            sequence.recomputed = sequence.recomputed or sequence.num_sampled > 0
            if sequence.scores is not None:
                sequence.scores.clear()
            self._push_waiting(sequence)

    # -- around weight updates ----------------------------------------------------------------------------------------

    def on_weight_update(self, model: str | None, recompute: bool) -> None:
        """Prepare for new weights of one model, or of the base and so of all (None). Older prefixes are never shared
        again; running sequences keep their mixed caches or recompute them."""
        touched = _sequences_of(model, self.running.values())
        for sequence in touched:
            sequence.has_mixed_cache = sequence.has_mixed_cache or (bool(sequence.num_sampled) and not recompute)
        # Sequences without a sampled token always restart: a completion of one version has a cache of that version.
        self.preempt(s for s in touched if recompute or not s.num_sampled)
        for sequence in (*touched, *self._leaving):
            sequence.weights_key = None
        self._prefixes_in_progress.clear()
        self._cache.reset_prefixes()

    def preempt(self, sequences: Iterable[DecodeSequence]) -> None:
        """Take them out of the cache, to be computed anew once no launched step writes there."""
        for sequence in list(sequences):
            del self.running[sequence.slot]
            sequence.is_preempted = True
            self._start_leaving(sequence)

    def sampled_sequences(self, model: str | None) -> list[DecodeSequence]:
        """Sequences that have sampled something from this model, or from any (None), and are not done."""
        return [s for s in self._alive(model) if s.num_sampled]

    def _alive(self, model: str | None) -> list[DecodeSequence]:
        """Sequences of this model, or of any (None), that are not done."""
        return _sequences_of(model, (*self.running.values(), *(entry[-1] for entry in self._waiting)))

    def abort(self, sequences: Iterable[DecodeSequence]) -> None:
        """Take them out, wherever they are."""
        out = list(sequences)
        self._waiting = [entry for entry in self._waiting if entry[-1] not in out]
        heapq.heapify(self._waiting)
        for sequence in out:
            self.release(sequence)

    def abort_model(self, model: str | None) -> list[DecodeSequence]:
        """Take out all that waits for this model or runs with it, or with any (None)."""
        out = self._alive(model)
        self.abort(out)
        return out

    def drain(self) -> Iterable[DecodeSequence]:
        """Take everything out, for shutting down."""
        everything = [*self._alive(None), *self._leaving]
        self._waiting.clear()
        for sequence in everything:
            sequence.pending_steps, sequence.may_hold_nan = 0, False  # a device that failed cannot be asked to clean up
            self.release(sequence)
        return everything


def _sequences_of(model: str | None, sequences: Iterable[DecodeSequence]) -> list[DecodeSequence]:
    """Those of a model, or all (None)."""
    return [s for s in sequences if model is None or s.request.model == model]
