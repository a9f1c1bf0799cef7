"""Attention of one eager step: what each token sees of the cache, in plain torch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.engine.cpu import native
from paceline.engine.cpu.kv_cache import SlotCache
from paceline.engine.pages import PageCache
from paceline.engine.sequence import Chunk
from paceline.model.adapters import Adapters
from paceline.model.attention import Mixer, PackedPlan, Scores, sdpa, window_mask
from paceline.model.states import StateCache


class CachedPlan:
    """Attention of one engine step: single tokens over their slots, fresh prompts among themselves, then the rest.

    The tokens of a step lie in that order: `singles`, `fresh`, `resumed`. After them come as many of the scratch slot
    as are missing from the full batch that decodes with `deterministic`.
    """

    def __init__(
        self, cache: SlotCache | PageCache, singles: Sequence[Chunk], fresh: Sequence[Chunk],
        resumed: Sequence[Chunk], deterministic: bool, adapters: Adapters | None = None,
    ) -> None:  # fmt: skip
        device = cache.device
        self._cache, self._adapters = cache, adapters
        spans = [(chunk.sequence.slot, chunk.start, chunk.length) for chunk in (*singles, *fresh, *resumed)]
        self.padding = cache.slots - len(singles) if deterministic and singles else 0
        assert not (self.padding and (fresh or resumed))
        padded = spans + [(cache.slots, 0, 1)] * self.padding
        slots, starts, lengths = map(torch.tensor, zip(*padded, strict=True))
        first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        self.slots = slots.repeat_interleave(lengths).to(device)
        self.positions = (starts.repeat_interleave(lengths) + torch.arange(len(first)) - first).to(device)
        self._singles = len(singles) + self.padding
        self._rows = cache.slots + 1 if deterministic else max((c.sequence.slot for c in singles), default=-1) + 1
        self._width = cache.max_length if deterministic else max((c.start for c in singles), default=-1) + 1
        self._dense = self._rows == len(singles) and not deterministic
        """Every row has its query, in order: nothing to scatter or gather."""
        here = slice(self._singles)
        self._last = torch.zeros(self._rows, dtype=torch.long, device=device)
        self._last[self.slots[here]] = self.positions[here]
        """The position each row's query stands at; rows without a query look at position 0 and are thrown away."""
        self._masks: dict[int | None, Tensor] = {}
        self._fresh = PackedPlan([chunk.length for chunk in fresh], device) if fresh else None
        self._fresh_tokens = sum(chunk.length for chunk in fresh)
        self._resumed = resumed
        routes = [chunk.adapter for chunk in (*singles, *fresh, *resumed) for _ in range(chunk.length)]
        self._routes = torch.tensor(routes + [0] * self.padding, device=device)
        self.route(slice(None))
        if isinstance(cache, SlotCache) and cache.keeps_states:
            cache.reset_states((*singles, *fresh))
            self._prompts = [(c.sequence.slot, c.start, c.length) for c in (*fresh, *resumed)]

    def route(self, tokens: slice) -> None:
        """The adapters of the next pass, which holds these tokens of the step."""
        if self._adapters is not None:
            self._adapters.route(self._routes[tokens])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        self._cache.write(layer, self.slots, self.positions, k, v)
        parts = []
        if self._singles:
            parts.append(self._attend_singles(layer, q[: self._singles], scores))
        at = self._singles
        if self._fresh is not None:
            here = slice(at, at + self._fresh_tokens)
            parts.append(self._fresh.attend(layer, q[here], k[here], v[here], scores))
            at += self._fresh_tokens
        for chunk in self._resumed:
            parts.append(self._attend_resumed(layer, q[at : at + chunk.length], chunk, scores))
            at += chunk.length
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_singles(self, layer: int, q: Tensor, scores: Scores) -> Tensor:
        """One query per slot: by our own kernel if there is one for it.

        In torch, the heads that share a KV head become the query positions of one call: the cache is read in place and
        never repeated."""
        slots, cache, window = self.slots[: self._singles], self._cache, scores.window
        if isinstance(cache, SlotCache) and scores.is_plain:
            keys, values = cache.keys[layer], cache.values[layer]
            if native.has_kernel(keys, values, q.shape[1]):
                positions = self.positions[: self._singles]
                return native.attend(keys, values, q, slots, positions, scores.scale, window)
        keys, values = cache.read(layer, slice(self._rows), self._width)
        heads, (kv_heads, dim), width = q.shape[1], keys.shape[2:], values.shape[3]
        rows = q if self._dense else q.new_zeros(self._rows, heads, dim).index_copy_(0, slots, q)
        if window not in self._masks:
            seen = window_mask(self._last[:, None], torch.arange(self._width, device=q.device), window)
            # Additive, because a boolean mask would be converted again in every layer.
            self._masks[window] = q.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None]
        if not scores.is_plain:
            out = sdpa(rows[:, None], keys, values, scores, self._masks[window])[:, 0]
            return out if self._dense else out.index_select(0, slots)
        rows = rows.reshape(self._rows, kv_heads, heads // kv_heads, dim)
        out = F.scaled_dot_product_attention(
            rows, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=self._masks[window], scale=scores.scale
        )
        out = out.reshape(self._rows, heads, width)
        return out if self._dense else out.index_select(0, slots)

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Single tokens together; each prompt or piece of one alone, since states must not take in padding."""
        parts = []
        if self._singles:
            rows = hidden[: self._singles, None]
            parts.append(self._mix(layer, mixer, rows, self.slots[: self._singles])[:, 0])
        at = self._singles
        for slot, start, length in self._prompts:
            here = slice(at, at + length)
            self.route(here)
            slots = torch.tensor([slot], device=hidden.device)
            parts.append(self._mix(layer, mixer, hidden[None, here], slots, begins=start == 0)[0])
            at += length
        if self._prompts:
            self.route(slice(None))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _mix(self, layer: int, mixer: Mixer, rows: Tensor, slots: Tensor, begins: bool = False) -> Tensor:
        assert isinstance(self._cache, SlotCache)
        cache = StateCache(None if begins else self._cache.read_states(layer, slots))
        out = mixer(rows, cache)
        self._cache.write_states(layer, slots, cache.states)
        return out

    def _attend_resumed(self, layer: int, q: Tensor, chunk: Chunk, scores: Scores) -> Tensor:
        """A later piece of a long prompt looks at all that came before it in its slot."""
        slot, end = chunk.sequence.slot, chunk.start + chunk.length
        keys, values = self._cache.read(layer, slice(slot, slot + 1), end)
        queries = torch.arange(chunk.start, end, device=q.device)
        mask = window_mask(queries, torch.arange(end, device=q.device), scores.window)
        return sdpa(q[None], keys, values, scores, mask)[0]
