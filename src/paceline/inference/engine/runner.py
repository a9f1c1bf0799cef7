"""Runs one step of the model: tokens in, sampled tokens out."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.inference.engine.cache import CachedPlan, SlotCache, Span
from paceline.inference.engine.sampler import Draw, sample
from paceline.inference.engine.scheduler import Chunk, Sequence
from paceline.model import PLAN, Head, PackedPlan, token_logprobs


class Sampled(NamedTuple):
    """The token drawn after a chunk."""

    chunk: Chunk
    token: int
    logprob: float
    log_z: float | None


class Runner:
    """The model with its cache. With `fixed_shape`, decoding always runs at the full batch and each prompt alone, so a
    token's bits do not depend on its neighbours."""

    def __init__(self, model: PreTrainedModel, head: Head, cache: SlotCache, fixed_shape: bool) -> None:
        self._decoder = model.get_decoder()
        self._head = head
        self._cache = cache
        self._fixed_shape = fixed_shape
        self._device = model.device
        self._rows: list[Sequence] = []
        self._last_draw: Draw | None = None

    def run(self, chunks: Seq[Chunk]) -> list[Sampled]:
        """Compute the chunks and sample where they ask for it."""
        singles = sorted((c for c in chunks if c.length == 1), key=lambda c: c.sequence.slot)
        fresh = [c for c in chunks if c.length > 1 and c.start == 0]
        resumed = [c for c in chunks if c.length > 1 and c.start > 0]
        if not self._fixed_shape:
            return self._forward(singles, fresh, resumed)
        for chunk in fresh:
            self._forward([], [chunk], [])
        for chunk in resumed:
            self._forward([], [], [chunk])
        return self._forward(singles, [], []) if singles else []

    def _forward(self, singles: Seq[Chunk], fresh: Seq[Chunk], resumed: Seq[Chunk]) -> list[Sampled]:
        chunks = [*singles, *fresh, *resumed]
        padding = self._cache.slots - len(singles) if self._fixed_shape and singles else 0
        spans = [_spans(part) for part in (singles, fresh, resumed)]
        spans[0] += [Span(self._cache.scratch, 0, 1)] * padding
        plan = CachedPlan(self._cache, *spans, fixed_shape=self._fixed_shape)
        ids = [t for c in singles for t in c.sequence.tokens[c.start : c.start + c.length]] + [0] * padding
        ids += [t for c in (*fresh, *resumed) for t in c.sequence.tokens[c.start : c.start + c.length]]
        hidden = self._decode(torch.tensor(ids), plan.positions, plan)
        drawn = [c for c in chunks if c.samples]
        if not drawn:
            return []
        ends = self._ends(chunks)
        if self._fixed_shape:
            return self._sample(drawn, self._head(hidden).index_select(0, ends))
        return self._sample(drawn, self._head(hidden.index_select(0, ends)))

    def _decode(self, ids: Tensor, positions: Tensor, plan: CachedPlan | PackedPlan) -> Tensor:
        ids, positions = ids.to(self._device)[None], positions.to(self._device)[None]
        out = self._decoder(input_ids=ids, position_ids=positions, use_cache=False, **{PLAN: plan})
        return out.last_hidden_state[0]

    def _ends(self, chunks: Seq[Chunk]) -> Tensor:
        """Where the last token of each sampling chunk lies in the step."""
        ends, at = [], 0
        for chunk in chunks:
            at += chunk.length
            if chunk.samples:
                ends.append(at - 1)
        return torch.tensor(ends, device=self._device)

    def _sample(self, chunks: Seq[Chunk], logits: Tensor) -> list[Sampled]:
        indices = torch.tensor([c.sequence.sampled for c in chunks], device=self._device)
        tokens, logprobs, log_z = sample(logits, replace(self._draw([c.sequence for c in chunks]), indices=indices))
        kept = [None] * len(chunks) if log_z is None else log_z.tolist()
        return [Sampled(*row) for row in zip(chunks, tokens.tolist(), logprobs.tolist(), kept, strict=True)]

    def _draw(self, sequences: list[Sequence]) -> Draw:
        """How these rows are sampled; built anew only when the rows change."""
        if sequences != self._rows:
            requests = [s.request for s in sequences]

            def column(values: list, dtype: torch.dtype) -> Tensor:
                return torch.tensor(values, dtype=dtype, device=self._device)

            self._rows = sequences
            self._last_draw = Draw(
                temperatures=column([r.temperature for r in requests], torch.float32),
                top_p=column([r.top_p for r in requests], torch.float32),
                top_k=column([r.top_k for r in requests], torch.long),
                keys=column([r.noise for r in requests], torch.long),
                indices=column([0] * len(requests), torch.long),
                truncates=any(r.top_p < 1 or r.top_k for r in requests),
                greedy=any(r.temperature == 0 for r in requests),
            )
        assert self._last_draw is not None
        return self._last_draw

    def score(self, sequences: Seq[Seq[int]], temperature: float) -> list[list[float]]:
        """Log probability of each token given those before it; 0.0 for the first."""
        lengths = [len(s) for s in sequences]
        ids = torch.tensor([t for s in sequences for t in s], device=self._device)
        positions = torch.cat([torch.arange(n) for n in lengths])
        hidden = self._decode(ids, positions, PackedPlan(lengths, self._device))
        temperatures = torch.full((len(ids) - 1,), temperature, device=self._device)
        logprobs, _ = token_logprobs(self._head, hidden[:-1], ids[1:], temperatures)
        flat = [0.0, *logprobs.tolist()]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        return [[0.0, *flat[at + 1 : at + n]] for at, n in zip(starts, lengths, strict=True)]


def _spans(chunks: Seq[Chunk]) -> list[Span]:
    return [Span(c.sequence.slot, c.start, c.length) for c in chunks]
