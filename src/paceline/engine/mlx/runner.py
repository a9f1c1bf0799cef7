"""Runs one step of the model with MLX: tokens in, sampled tokens out."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import mlx.core as mx
import numpy as np

from paceline.engine.mlx.adapters import MlxAdapters
from paceline.engine.mlx.kv_cache import MlxSlots, Pass, decoding, prompting
from paceline.engine.mlx.sampler import sample, token_logprobs
from paceline.engine.runner import Runner, StepInFlight
from paceline.engine.sampling import SamplerOutput, SamplingMetadata
from paceline.engine.sequence import Chunk
from paceline.model.mlx.loading import MlxModel

SCORED_ROWS = 256
"""Positions whose logits are held at once when a text is scored."""


class MlxFlight(StepInFlight):
    """A step that is being computed."""

    def __init__(self, chunks: Sequence[Chunk], drawn: list[Chunk], sampled: SamplerOutput | None) -> None:
        super().__init__(chunks)
        self._drawn, self._sampled = drawn, sampled

    def land(self) -> None:
        if self._sampled is not None:
            self._sampled.hand_out(self._drawn)


class MlxRunner(Runner):
    """The model with its cache. With `deterministic`, decoding always runs at the full batch and each prompt alone, so
    that a token's bits do not depend on its neighbours.

    Whatever a step touches is computed with it, the cache too: a graph never evaluated only grows. Steps in
    flight are possible but do not pay: while one still reads the cache, the next cannot write to the same memory, and
    copies all of it.
    """

    def __init__(
        self, model: MlxModel, cache: MlxSlots, deterministic: bool, adapters: MlxAdapters | None, depth: int
    ) -> None:
        self.depth = depth
        self._model, self._cache, self._deterministic, self._adapters = model, cache, deterministic, adapters
        self._device = mx.default_device()
        self._last = mx.zeros(cache.slots + 1, mx.int32)
        """The token each slot sampled last, for those whose step has not landed."""
        mx.eval(self._last)

    def context(self) -> AbstractContextManager[object]:
        return mx.stream(self._device)

    def sync(self) -> None:
        mx.synchronize()

    def close(self) -> None:
        self._last = mx.zeros(0, mx.int32)

    def launch(self, chunks: Sequence[Chunk]) -> MlxFlight:
        singles = sorted((c for c in chunks if c.length == 1), key=lambda c: c.sequence.slot)
        passes = prompting(self._cache, [c for c in chunks if c.length > 1], self._deterministic)
        if singles:
            passes.append(decoding(self._cache, singles, self._deterministic))
        drawn: list[Chunk] = []
        logits: list[mx.array] = []
        for step in passes:
            hidden = self._hidden(step)
            self._score(step, hidden)
            if ends := [(row, chunk) for row, chunk in step.chunks if chunk.samples]:
                drawn += [chunk for _, chunk in ends]
                logits.append(self._ends(hidden, ends))
        sampled = self._sample(drawn, mx.concatenate(logits)) if drawn else None
        out = (*sampled[:3], *(sampled.top or ())) if sampled else ()
        mx.async_eval(self._cache.arrays, self._last, [array for array in out if array is not None])
        return MlxFlight(chunks, drawn, sampled)

    def _hidden(self, step: Pass) -> mx.array:
        if self._adapters is not None:
            slots = [0] * step.rows
            for row, chunk in step.chunks:
                slots[row] = chunk.adapter
            self._adapters.route(slots)
        return self._model.hidden(self._tokens(step), step.caches)

    def _tokens(self, step: Pass) -> mx.array:
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

    def _ends(self, hidden: mx.array, ends: list[tuple[int, Chunk]]) -> mx.array:
        """Logits after the last token of each of these rows."""
        rows = mx.array([row for row, _ in ends])
        if self._deterministic:
            return self._model.logits(hidden[:, -1])[rows]
        return self._model.logits(hidden[rows, mx.array([chunk.length - 1 for _, chunk in ends])])

    def _sample(self, drawn: list[Chunk], logits: mx.array) -> SamplerOutput:
        sampled = sample(logits, SamplingMetadata.of(drawn, np.array).at(drawn, logits.shape[-1], np.array))
        self._last[mx.array([chunk.sequence.slot for chunk in drawn])] = sampled.tokens
        return sampled

    def _score(self, step: Pass, hidden: mx.array) -> None:
        for row, chunk in step.chunks:
            if chunk.sequence.scores is None:
                continue
            targets, chunk.scores = chunk.targets, []
            for at in range(0, len(targets), SCORED_ROWS):
                some = targets[at : at + SCORED_ROWS]
                logits = self._model.logits(hidden[row, at : at + len(some)])
                chunk.scores += token_logprobs(logits, some, chunk.sequence.request.temperature).tolist()
