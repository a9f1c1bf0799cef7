"""Runs one step of the model eagerly, in torch: tokens in, sampled tokens out."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.engine.cpu.attention import CachedPlan, SlotSpan
from paceline.engine.cpu.kv_cache import SlotCache
from paceline.engine.cpu.sampler import sample, tensor_factory
from paceline.engine.pages import PageCache
from paceline.engine.runner import Runner, SamplingMetadata, StepInFlight
from paceline.engine.sequence import Chunk, DecodeSequence
from paceline.model import PLAN, LMHead, token_logprobs
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
        singles = sorted((c for c in chunks if c.length == 1), key=lambda c: c.sequence.slot)
        fresh = [c for c in chunks if c.length > 1 and c.start == 0]
        resumed = [c for c in chunks if c.length > 1 and c.start > 0]
        if not self._deterministic:
            self._forward(singles, fresh, resumed)
        else:
            for chunk in fresh:
                self._forward([], [chunk], [])
            for chunk in resumed:
                self._forward([], [], [chunk])
            if singles:
                self._forward(singles, [], [])
        return StepInFlight(chunks)

    def _forward(self, singles: Sequence[Chunk], fresh: Sequence[Chunk], resumed: Sequence[Chunk]) -> None:
        chunks = [*singles, *fresh, *resumed]
        spans = _spans(singles)
        ids = [
            t for c in chunks for t in c.sequence.tokens[c.start : c.start + c.length] or [self._last[c.sequence.slot]]
        ]
        routes = [c.adapter for c in chunks for _ in range(c.length)]
        if self._deterministic and singles:
            missing = self._cache.slots - len(singles)
            spans += [SlotSpan(self._cache.slots, 0, 1)] * missing
            ids += [0] * missing
            routes += [0] * missing
        plan = CachedPlan(self._cache, spans, _spans(fresh), _spans(resumed), self._deterministic)
        hidden = self._run_model(torch.tensor(ids), plan, routes)
        self._score(chunks, hidden)
        sampled_chunks = [c for c in chunks if c.samples]
        if sampled_chunks:
            ends = self._last_rows(chunks)
            logits = (
                self._head(hidden).index_select(0, ends)
                if self._deterministic
                else self._head(hidden.index_select(0, ends))
            )
            sample(logits, self._sampling_metadata(sampled_chunks)).assign_to(sampled_chunks)
            self._last.update(
                (c.sequence.slot, c.sampled_token.token) for c in sampled_chunks if c.sampled_token is not None
            )

    def _run_model(self, ids: Tensor, plan: CachedPlan, routes: list[int]) -> Tensor:
        if self._adapters is not None:
            self._adapters.route(torch.tensor(routes, device=self._device))
        ids, positions = ids.to(self._device)[None], plan.positions.to(self._device)[None]
        out = self._decoder(input_ids=ids, position_ids=positions, use_cache=False, **{PLAN: plan})
        return out.last_hidden_state[0]

    def _last_rows(self, chunks: Sequence[Chunk]) -> Tensor:
        """Where the last token of each sampling chunk lies in the step."""
        ends, at = [], 0
        for chunk in chunks:
            at += chunk.length
            if chunk.samples:
                ends.append(at - 1)
        return torch.tensor(ends, device=self._device)

    def _score(self, chunks: Sequence[Chunk], hidden: Tensor) -> None:
        at = 0
        for chunk in chunks:
            if chunk.sequence.scores is not None:
                targets = torch.tensor(chunk.targets, device=self._device)
                temperatures = torch.full((len(targets),), chunk.sequence.request.temperature, device=self._device)
                logprobs, _ = token_logprobs(self._head, hidden[at : at + len(targets)], targets, temperatures)
                chunk.scores = logprobs.tolist()
            at += chunk.length

    def _sampling_metadata(self, chunks: list[Chunk]) -> SamplingMetadata:
        """How these rows are sampled; built anew only when the rows change."""
        sequences = [c.sequence for c in chunks]
        if sequences != self._rows or self._metadata is None:
            self._rows = sequences
            self._metadata = SamplingMetadata.from_chunks(chunks, tensor_factory(self._device))
        return self._metadata.for_step(chunks, self._head.vocabulary, tensor_factory(self._device))


def _spans(chunks: Sequence[Chunk]) -> list[SlotSpan]:
    return [SlotSpan(c.sequence.slot, c.start, c.length) for c in chunks]
