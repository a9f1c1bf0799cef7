"""Runs one step of the model with MLX: tokens in, sampled tokens out."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import mlx.core as mx
import numpy as np

from paceline.engine.mlx.adapters import MlxAdapters
from paceline.engine.mlx.kv_cache import MlxDecodePass, MlxSlotCache, decode_pass, prompt_passes
from paceline.engine.mlx.sampler import sample, token_logprobs
from paceline.engine.runner import Runner, SamplerOutput, SamplingMetadata, StepInFlight
from paceline.engine.sequence import Chunk
from paceline.model.mlx.loading import MlxModel

SCORED_ROWS = 256
"""Positions whose logits are held at once when a text is scored."""


class MlxStepInFlight(StepInFlight):
    def __init__(self, chunks: Sequence[Chunk], sampled_chunks: list[Chunk], sampled: SamplerOutput | None) -> None:
        super().__init__(chunks)
        self._sampled_chunks, self._sampled = sampled_chunks, sampled

    def land(self) -> None:
        if self._sampled is not None:
            self._sampled.assign_to(self._sampled_chunks)


class MlxRunner(Runner):
    """The model with its cache. With `deterministic`, decoding always runs at the full batch and each prompt alone, so
    that a token's bits do not depend on its neighbours.

    Whatever a step touches is computed with it, the cache too: a graph never evaluated only grows. Steps in
    flight are possible but do not pay: while one still reads the cache, the next cannot write to the same memory, and
    copies all of it.
    """

    def __init__(
        self, model: MlxModel, cache: MlxSlotCache, deterministic: bool, adapters: MlxAdapters | None, depth: int
    ) -> None:
        self.depth = depth
        self._model, self._cache, self._deterministic, self._adapters = model, cache, deterministic, adapters
        self._device = mx.default_device()
        self._last = mx.zeros(cache.slots + 1, mx.int32)
        """The token each slot sampled last, for those whose step has not landed."""
        mx.eval(self._last)

    def context(self) -> AbstractContextManager[object]:
        return mx.stream(self._device)

    def close(self) -> None:
        self._last = mx.zeros(0, mx.int32)

    def launch(self, chunks: Sequence[Chunk]) -> MlxStepInFlight:
        singles = sorted((c for c in chunks if c.length == 1), key=lambda c: c.sequence.slot)
        passes = prompt_passes(self._cache, [c for c in chunks if c.length > 1], self._deterministic)
        if singles:
            passes.append(decode_pass(self._cache, singles, self._deterministic))
        sampled_chunks: list[Chunk] = []
        logits: list[mx.array] = []
        for step in passes:
            hidden = self._hidden_states(step)
            self._score(step, hidden)
            if ends := [(row, chunk) for row, chunk in step.chunks if chunk.samples_token]:
                sampled_chunks += [chunk for _, chunk in ends]
                logits.append(self._last_logits(hidden, ends))
        sampled = self._sample(sampled_chunks, mx.concatenate(logits)) if sampled_chunks else None
        out = (*sampled[:3], *(sampled.top or ())) if sampled else ()
        mx.async_eval(self._cache.arrays, self._last, [array for array in out if array is not None])
        return MlxStepInFlight(chunks, sampled_chunks, sampled)

    def _hidden_states(self, step: MlxDecodePass) -> mx.array:
        if self._adapters is not None:
            slots = [0] * step.rows
            for row, chunk in step.chunks:
                slots[row] = chunk.adapter
            self._adapters.route(slots)
        return self._model.hidden(self._input_ids(step), step.caches)

    def _input_ids(self, step: MlxDecodePass) -> mx.array:
        rows = [[0] * step.tokens_per_row for _ in range(step.rows)]
        unseen = []
        for row, chunk in step.chunks:
            known = chunk.sequence.tokens[chunk.start : chunk.start + chunk.length]
            rows[row][: len(known)] = known
            if not known:
                unseen.append((row, chunk.sequence.slot))
        tokens = mx.array(rows)
        if unseen:  # sampled in a step that has not landed
            at, slots = zip(*unseen, strict=True)
            tokens[mx.array(at), 0] = self._last[mx.array(slots)]
        return tokens

    def _last_logits(self, hidden: mx.array, ends: list[tuple[int, Chunk]]) -> mx.array:
        """Logits after the last token of each of these rows."""
        rows = mx.array([row for row, _ in ends])
        if self._deterministic:
            return self._model.logits(hidden[:, -1])[rows]
        return self._model.logits(hidden[rows, mx.array([chunk.length - 1 for _, chunk in ends])])

    def _sample(self, sampled_chunks: list[Chunk], logits: mx.array) -> SamplerOutput:
        metadata = SamplingMetadata.from_chunks(sampled_chunks, np.array)
        sampled = sample(logits, metadata.for_step(sampled_chunks, logits.shape[-1], np.array))
        self._last[mx.array([chunk.sequence.slot for chunk in sampled_chunks])] = sampled.tokens
        return sampled

    def _score(self, step: MlxDecodePass, hidden: mx.array) -> None:
        for row, chunk in step.chunks:
            if chunk.sequence.scores is None:
                continue
            targets, chunk.scores = chunk.targets, []
            for at in range(0, len(targets), SCORED_ROWS):
                some = targets[at : at + SCORED_ROWS]
                logits = self._model.logits(hidden[row, at : at + len(some)])
                chunk.scores += token_logprobs(logits, some, chunk.sequence.request.temperature).tolist()
