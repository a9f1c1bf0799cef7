"""The KV cache: one slot per running request, and the attention plan that reads and writes it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from paceline.model.attention import PackedPlan, sdpa, window_mask


class SlotCache:
    """Keys and values as [slot, position, kv head, dim] per layer; a decode step reads them without gathering.

    One slot more than asked for takes the writes of padding rows. The length grows by doubling up to `max_length`, so
    short conversations never pay for the model's whole context.
    """

    def __init__(
        self, config: PreTrainedConfig, slots: int, length: int, max_length: int, dtype: torch.dtype, device: str
    ) -> None:
        text = config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self.slots, self.length, self.max_length = slots, length, max_length
        shape = (slots + 1, length, heads, dim)
        self.keys, self.values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(text.num_hidden_layers)] for _ in range(2)
        )

    @property
    def scratch(self) -> int:
        """The slot nobody reads."""
        return self.slots

    def ensure(self, length: int) -> None:
        """Room for `length` positions in every slot."""
        if length <= self.length:
            return
        self.length = min(self.max_length, max(length, 2 * self.length))
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                store[layer] = F.pad(old, (0, 0, 0, 0, 0, self.length - old.shape[1]))

    def copy_prefix(self, source: int, targets: Sequence[int], length: int) -> None:
        """Share a computed prompt: copying it is far cheaper than computing it."""
        slots = torch.tensor(targets, device=self.keys[0].device)
        for store in (self.keys, self.values):
            for layer in store:
                layer[slots, :length] = layer[source, :length]

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        self.keys[layer][slots, positions] = k
        self.values[layer][slots, positions] = v


@dataclass(frozen=True, slots=True)
class Span:
    """`length` tokens of one slot, from position `start`."""

    slot: int
    start: int
    length: int


class CachedPlan:
    """Attention of one engine step: single tokens over their slots, fresh prompts among themselves, then the rest.

    The tokens of a step lie in that order: `singles`, `fresh`, `resumed`.
    """

    def __init__(
        self,
        cache: SlotCache,
        singles: Sequence[Span],
        fresh: Sequence[Span],
        resumed: Sequence[Span],
        fixed_shape: bool = False,
    ) -> None:
        device = cache.keys[0].device
        self._cache = cache
        spans = [*singles, *fresh, *resumed]
        lengths = torch.tensor([span.length for span in spans])
        self.slots = torch.tensor([span.slot for span in spans]).repeat_interleave(lengths).to(device)
        starts = torch.tensor([span.start for span in spans]).repeat_interleave(lengths)
        first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        self.positions = (starts + torch.arange(len(starts)) - first).to(device)
        self._singles = len(singles)
        self._rows = cache.slots + 1 if fixed_shape else max((span.slot for span in singles), default=-1) + 1
        self._width = cache.length if fixed_shape else max((span.start for span in singles), default=-1) + 1
        self._dense = self._rows == len(singles) and not fixed_shape
        """Every row has its query, in order: nothing to scatter or gather."""
        self._last = _last_positions(singles, self._rows, device)
        self._masks: dict[int | None, Tensor] = {}
        self._fresh = PackedPlan([span.length for span in fresh], device) if fresh else None
        self._fresh_tokens = sum(span.length for span in fresh)
        self._resumed = resumed

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        self._cache.write(layer, self.slots, self.positions, k, v)
        parts = []
        if self._singles:
            parts.append(self._attend_singles(layer, q[: self._singles], scale, window))
        at = self._singles
        if self._fresh is not None:
            here = slice(at, at + self._fresh_tokens)
            parts.append(self._fresh.attend(layer, q[here], k[here], v[here], scale, window))
            at += self._fresh_tokens
        for span in self._resumed:
            parts.append(self._attend_resumed(layer, q[at : at + span.length], span, scale, window))
            at += span.length
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_singles(self, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        """One query per slot. The heads that share a KV head become the query positions of one call, so the cache is
        read in place and never repeated."""
        slots = self.slots[: self._singles]
        keys, values = (store[layer][: self._rows, : self._width] for store in (self._cache.keys, self._cache.values))
        heads, (kv_heads, dim) = q.shape[1], keys.shape[2:]
        rows = q if self._dense else q.new_zeros(self._rows, heads, dim).index_copy_(0, slots, q)
        rows = rows.reshape(self._rows, kv_heads, heads // kv_heads, dim)
        if window not in self._masks:
            seen = window_mask(self._last[:, None], torch.arange(self._width, device=q.device), window)
            # Additive, because a boolean mask would be converted again in every layer.
            self._masks[window] = q.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None]
        out = F.scaled_dot_product_attention(
            rows, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=self._masks[window], scale=scale
        )
        out = out.reshape(self._rows, heads, dim)
        return out if self._dense else out.index_select(0, slots)

    def _attend_resumed(self, layer: int, q: Tensor, span: Span, scale: float, window: int | None) -> Tensor:
        """A later piece of a long prompt looks at all that came before it in its slot."""
        end = span.start + span.length
        keys, values = (store[layer][span.slot, :end][None] for store in (self._cache.keys, self._cache.values))
        queries = torch.arange(span.start, end, device=q.device)
        mask = window_mask(queries, torch.arange(end, device=q.device), window)
        return sdpa(q[None], keys, values, scale, mask)[0]


def _last_positions(singles: Sequence[Span], rows: int, device: torch.device) -> Tensor:
    """The position each row's query stands at; rows without a query look at position 0 and are thrown away."""
    last = torch.zeros(rows, dtype=torch.long)
    last[torch.tensor([span.slot for span in singles], dtype=torch.long)] = torch.tensor(
        [span.start for span in singles], dtype=torch.long
    )
    return last.to(device)
