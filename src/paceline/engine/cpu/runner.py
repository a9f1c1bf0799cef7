"""Runs one step of the model eagerly, in torch: tokens in, sampled tokens out."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.engine.cpu.attention import CachedPlan
from paceline.engine.cpu.kv_cache import SlotCache
from paceline.engine.cpu.sampler import sample, tensor_factory
from paceline.engine.pages import PageCache
from paceline.engine.runner import Runner, SamplingMetadata, StepInFlight
from paceline.engine.sequence import Chunk, DecodeSequence
from paceline.model import LMHead, hidden_states, token_logprobs
from paceline.model.adapters import Adapters


class EagerRunner(Runner):
    """The model with its cache. With `deterministic`, decoding always runs at the full batch and each prompt alone, so
    that a token's bits do not depend on its neighbours."""

    def __init__(
        self, model: PreTrainedModel, head: LMHead, cache: SlotCache | PageCache, deterministic: bool,
        adapters: Adapters | None, depth: int,
    ) -> None:  # fmt: skip
        self.depth = depth
        self._decoder, self._device = model.get_decoder(), model.device
        self._head, self._cache, self._deterministic, self._adapters = head, cache, deterministic, adapters
        self._last: dict[int, int] = {}
        """The token each slot sampled last, for those whose step has not landed."""
        self._rows: list[DecodeSequence] = []
        self._metadata: SamplingMetadata | None = None

    def launch(self, chunks: Sequence[Chunk]) -> StepInFlight:
        if not self._deterministic:
            self._forward(chunks)
        else:
            for chunk in chunks:
                if chunk.length > 1:
                    self._forward([chunk])
            if singles := [c for c in chunks if c.length == 1]:
                self._forward(singles)
        return StepInFlight(chunks)

    def _forward(self, chunks: Sequence[Chunk]) -> None:
        singles = sorted((c for c in chunks if c.length == 1), key=lambda c: c.sequence.slot)
        fresh = [c for c in chunks if c.length > 1 and c.start == 0]
        resumed = [c for c in chunks if c.length > 1 and c.start > 0]
        chunks = [*singles, *fresh, *resumed]
        plan = CachedPlan(self._cache, singles, fresh, resumed, self._deterministic, self._adapters)
        ids = [
            t for c in chunks for t in c.sequence.tokens[c.start : c.start + c.length] or [self._last[c.sequence.slot]]
        ]
        tokens = torch.tensor(ids + [0] * plan.padding, device=self._device)
        hidden = hidden_states(self._decoder, tokens, plan.positions, plan)
        if isinstance(self._cache, SlotCache) and self._cache.keeps_states:
            self._cache.keep_prompt_states(chunks)
        ends = list(itertools.accumulate(c.length for c in chunks))
        for chunk, end in zip(chunks, ends, strict=True):
            if chunk.sequence.scores is not None:
                chunk.scores = score(self._head, hidden[end - chunk.length :], chunk).tolist()
        sampled_chunks = [c for c in chunks if c.samples_token]
        if sampled_chunks:
            rows = torch.tensor(
                [e - 1 for c, e in zip(chunks, ends, strict=True) if c.samples_token], device=self._device
            )
            if self._deterministic:
                logits = self._head(hidden).index_select(0, rows)
            else:
                logits = self._head(hidden.index_select(0, rows))
            sample(logits, self._sampling_metadata(sampled_chunks)).assign_to(sampled_chunks)
            self._last.update(
                (c.sequence.slot, c.sampled_token.token) for c in sampled_chunks if c.sampled_token is not None
            )

    def _sampling_metadata(self, chunks: list[Chunk]) -> SamplingMetadata:
        """How these rows are sampled; built anew only when the rows change."""
        sequences = [c.sequence for c in chunks]
        if sequences != self._rows or self._metadata is None:
            self._rows = sequences
            self._metadata = SamplingMetadata.from_chunks(chunks, tensor_factory(self._device))
        return self._metadata.for_step(chunks, self._head.vocabulary, tensor_factory(self._device))


def score(head: LMHead, hidden: Tensor, chunk: Chunk) -> Tensor:
    """Log probability of the known token after each of a chunk's own; `hidden` begins with its first."""
    targets = torch.tensor(chunk.targets, device=hidden.device)
    temperatures = torch.full((len(targets),), chunk.sequence.request.temperature, device=hidden.device)
    return token_logprobs(head, hidden[: len(targets)], targets, temperatures)[0]
