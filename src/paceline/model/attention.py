"""One attention function for engine and trainer, registered with transformers.

A forward pass is always one row of tokens, many sequences laid end to end. Which token may look at which is not a mask
but a *plan*, handed through the model's keyword arguments: the trainer's plan attends inside each packed sequence, the
engine's plan also reads and writes the KV cache. So both run the very same model code. Layers that get no keyword
arguments find the plan of the thread that runs them.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from paceline.data.packing import similar_lengths
from paceline.errors import PacelineError

ATTENTION = "paceline"
ATTENTION_KEY = "paceline_plan"
"""The keyword by which a forward pass hands its plan to the attention function."""

# What models hand through for other attention functions and what a plan does not need.
_HARMLESS = {
    "position_ids", "position_embeddings", "use_cache", "cache_position", "past_key_values", "past_key_value",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "is_decoding",
    "num_items_in_batch", "labels", "deterministic",
}  # fmt: skip


class UnsupportedModel(PacelineError):
    """A model that needs something the attention function does not do."""


class NoAttentionPlan(RuntimeError):
    """The attention function was reached without a plan: the caller forgot it, or the model does not pass it on."""


class Scores(NamedTuple):
    """How a layer makes weights of the products of queries and keys."""

    scale: float
    window: int | None = None
    """How many tokens a query sees, itself included; None for all."""
    cap: float | None = None
    """Scores are squeezed between it and its negative, by tanh."""
    sinks: Tensor | None = None
    """Of each head a score that takes its share of the weights and has no value."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's attention makes the same weights."""
        return self.cap is None and self.sinks is None


Mixer = Callable[[Tensor, Any], Tensor]
"""The module of a layer with states: from hidden states of sequences, [sequences, tokens, width], to the same. Beside
them it takes the `StateCache` in which it finds and leaves its states, or None where all sequences begin and no state
is wanted."""


class AttentionPlan(Protocol):
    """Which tokens attend to which in one forward pass, and where the states of a sequence are."""

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        """`q` is [T, heads, dim], `k` [T, kv heads, dim] and `v` [T, kv heads, value dim]; the result has the heads of
        `q` and the width of `v`. `layer` is an int, or a tensor on the host where layers may be compiled
        (`number_layers`)."""
        ...

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """What a layer with states makes of a row of tokens, [T, width], each sequence from its own state."""
        ...


_thread = threading.local()


def current_plan() -> AttentionPlan | None:
    """The plan of the forward pass that this thread is in."""
    return getattr(_thread, "plan", None)


@contextmanager
def attending(plan: AttentionPlan | None) -> Generator[None]:
    """What this thread computes inside attends by this plan."""
    before, _thread.plan = current_plan(), plan
    try:
        yield
    finally:
        _thread.plan = before


def hidden_states(decoder: PreTrainedModel, ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
    """The last hidden states of a row of tokens, [tokens, width]."""
    with attending(plan):
        out = decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, **{ATTENTION_KEY: plan})
    hidden = out.last_hidden_state[0]
    if getattr(decoder.config, "residual_in_fp32", False):  # their head casts it
        hidden = hidden.to(decoder.get_input_embeddings().weight.dtype)
    return hidden


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep no activations of a layer but its input, and compute it anew in the backward pass, by the plan that it had:
    that pass may run on another thread, and after other forward passes."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model._set_gradient_checkpointing(True, _checkpoint)


def _checkpoint(layer: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(partial(_run_by, current_plan(), layer), *inputs, use_reentrant=False)


def _run_by(plan: AttentionPlan | None, layer: Callable[..., Any], *inputs: Any) -> Any:
    with attending(plan):
        return layer(*inputs)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature over a plan."""
    plan: AttentionPlan | None = kwargs.pop(ATTENTION_KEY, None)
    if plan is None and (plan := current_plan()) is None:
        raise NoAttentionPlan("a Paceline model was called without an attention plan")
    if kwargs.pop("is_causal", None) is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{type(module).__name__} looks ahead (is_causal is False), which is not supported")
    for name, given in kwargs.items():
        if given is not None and name not in _HARMLESS:
            raise UnsupportedModel(f"{type(module).__name__} asks its attention for `{name}`, which is not supported")
    if attention_mask is not None or dropout:
        raise UnsupportedModel(f"{type(module).__name__} uses an attention mask or dropout, which is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = module.layer_idx
    assert isinstance(layer, int | Tensor)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return plan.attend(layer, q, k, v, Scores(scale, sliding_window or None, softcap, s_aux))[None], None


AttentionInterface.register(ATTENTION, attention)


def sdpa(q: Tensor, k: Tensor, v: Tensor, scores: Scores, mask: Tensor | None = None) -> Tensor:
    """Scaled dot product over [N, L, heads, dim]; causal where no mask is given; grouped heads allowed. The window is
    the mask's matter."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    if scores.is_plain:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scores.scale)
    else:
        out = _weights(q @ k.transpose(2, 3), scores, mask).to(v.dtype) @ v
    return out.transpose(1, 2)


def _weights(products: Tensor, scores: Scores, mask: Tensor | None) -> Tensor:
    """Attention weights of [N, heads, L, S] products."""
    values = products.float() * scores.scale
    if scores.cap is not None:
        values = scores.cap * torch.tanh(values / scores.cap)
    if mask is None:
        mask = values.new_ones(values.shape[-2:], dtype=torch.bool).tril()
    values = values.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else values + mask
    if scores.sinks is None:
        return values.softmax(-1)
    sinks = scores.sinks.float()[None, :, None, None].expand(*values.shape[:-1], 1)
    return torch.cat((values, sinks), -1).softmax(-1)[..., :-1]


def window_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """True where a query position may see a key position. A window of w sees w tokens, itself included."""
    gap = queries[..., :, None] - keys[..., None, :]
    return (gap >= 0) & (gap < window) if window else gap >= 0


class PaddedBucket:
    """Sequences padded to their longest."""

    def __init__(self, members: list[int], lengths: list[int], device: torch.device | str) -> None:
        starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
        self.width = max(lengths[i] for i in members)
        self.rows = len(members)
        inside = [torch.arange(lengths[i]) for i in members]
        self.tokens = torch.cat([starts[i] + span for i, span in zip(members, inside, strict=True)]).to(device)
        self._indices = torch.cat([row * self.width + span for row, span in enumerate(inside)]).to(device)
        self._full = len(self._indices) == self.rows * self.width

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        return self.unpad(sdpa(self.pad(q), self.pad(k), self.pad(v), scores, self.mask(scores.window, q)))

    def mask(self, window: int | None, q: Tensor) -> Tensor | None:
        """What `sdpa` needs beyond causality."""
        if not window or window >= self.width:
            return None
        positions = torch.arange(self.width, device=q.device)
        return window_mask(positions, positions, window)

    def unpad(self, rows: Tensor) -> Tensor:
        """The tokens of padded rows, end to end."""
        flat = rows.reshape(-1, *rows.shape[2:])
        return flat if self._full else flat.index_select(0, self._indices)

    def pad(self, x: Tensor) -> Tensor:
        if not self._full:
            x = x.new_zeros(self.rows * self.width, *x.shape[1:]).index_copy(0, self._indices, x)
        return x.view(self.rows, self.width, *x.shape[1:])


class PackedPlan:
    """Sequences laid end to end, each attending to itself alone, causally.

    Sequences of similar length share one padded call: the padding is on the right, where causality hides it from every
    real token, so no mask is needed and nothing crosses from one sequence to another. Other kinds of `bucket` bring a
    mask of their own.
    """

    def __init__(
        self, lengths: list[int], device: torch.device | str, bucket: Callable[..., PaddedBucket] = PaddedBucket
    ) -> None:
        self._buckets = [bucket(members, lengths, device) for members in similar_lengths(lengths)]
        order = torch.cat([bucket.tokens for bucket in self._buckets])
        self._restore = torch.empty_like(order)
        self._restore[order] = torch.arange(len(order), device=order.device)

    def attend(self, layer: int | Tensor, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        if len(self._buckets) == 1:
            return self._buckets[0].attend(q, k, v, scores)
        parts = [b.attend(*(x.index_select(0, b.tokens) for x in (q, k, v)), scores) for b in self._buckets]
        return torch.cat(parts).index_select(0, self._restore)

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Padding stands on the right, where no real token looks."""
        parts = [b.unpad(mixer(b.pad(hidden.index_select(0, b.tokens)), None)) for b in self._buckets]
        return torch.cat(parts).index_select(0, self._restore)


class VarlenPlan:
    """Attention within each sequence of a packed row on CUDA: FlashAttention, without padding or masks. The call is
    opaque to the compiler, so that one compiled layer serves every cut into sequences."""

    def __init__(self, lengths: list[int], device: torch.device | str) -> None:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self._starts = ends.pin_memory().to(device, non_blocking=True)
        self._longest = torch.tensor(max(lengths))  # a tensor on the host: a number would be compiled in
        self._lengths = lengths

    def attend(self, layer: int | Tensor, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        assert scores.is_plain  # `can_varlen`
        return _varlen(q, k, v, self._starts, self._longest, scores.scale, scores.window or 0)[0]

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        return self._padded.mix(layer, mixer, hidden)

    @cached_property
    def _padded(self) -> PackedPlan:
        return PackedPlan(self._lengths, self._starts.device)


@torch.library.custom_op("paceline::varlen", mutates_args=())
def _varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Attention, and the log of each row's normaliser, which the backward pass needs."""
    most = int(longest)
    out, normaliser, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, most, most, 0.0, True, False, scale=scale, **window_sizes(window)
    )
    return out, normaliser


@_varlen.register_fake
def _(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("paceline::varlen_backward", mutates_args=())
def _varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, normaliser: Tensor, starts: Tensor, longest: Tensor,
    scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    most = int(longest)
    noise = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that is not there
    grads = torch.ops.aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out, normaliser, starts, starts, most, most, 0.0, True,
        noise, noise.new_empty(0), scale=scale, **window_sizes(window),
    )  # fmt: skip
    return grads[0], grads[1], grads[2]


@_varlen_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def window_sizes(window: int | None) -> dict[str, int]:
    """A window of w sees w tokens, itself included."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _save_for_backward(ctx, inputs, output) -> None:  # noqa: ANN001 - torch's own contract
    q, k, v, starts, longest, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, starts, longest)


def _backward(ctx, grad: Tensor, _: Tensor):  # noqa: ANN001, ANN202 - torch's own contract
    q, k, v, out, normaliser, starts, longest = ctx.saved_tensors
    grads = _varlen_backward(grad, q, k, v, out, normaliser, starts, longest, ctx.scale, ctx.window)
    return *grads, None, None, None, None


_varlen.register_autograd(_backward, setup_context=_save_for_backward)
