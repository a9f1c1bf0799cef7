"""From logits to tokens: one uniform number and one inverse CDF per token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.engine.runner import ArrayFactory, SamplerOutput, SamplingMetadata
from paceline.weights.update import mix_tensor, shift_right


def uniform(keys: Tensor, indices: Tensor) -> Tensor:
    """A float64 in [0, 1) for each (key, token index)."""
    bits = mix_tensor(keys ^ mix_tensor(indices))
    return shift_right(bits, 11).to(torch.float64) * 2.0**-53


BLOCK = 256
ONE_LEVEL_SIZE = 1024
"""Vocabularies up to this size are searched in one level."""


def tensor_factory(device: torch.device) -> ArrayFactory:
    """Makes tensors of this device from values and the name of a type."""
    return lambda values, dtype: torch.tensor(values, dtype=getattr(torch, dtype), device=device)


def sample(logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
    """Tokens with log-softmax(logits / T) over the full vocabulary. Temperature 0 is greedy, with logprobs at T = 1."""
    temperatures = metadata.temperatures
    if metadata.greedy:
        temperatures = torch.where(temperatures == 0, 1.0, temperatures)
    scaled, log_z = logits / temperatures[:, None], None
    if metadata.allowed_mask is None:
        full = probs = torch.softmax(scaled, -1)
    else:
        # Scaled up before the exponential: all that a grammar allows may be too improbable for float32.
        kept = torch.log_softmax(scaled, -1).masked_fill_(~metadata.allowed_mask, -torch.inf)
        log_z = torch.where(metadata.allowed_mask.all(-1), 0.0, kept.logsumexp(-1))
        full, probs = None, kept.sub_(log_z[:, None]).exp_()
    if metadata.truncates:
        probs = apply_top_k_top_p(probs, metadata.top_p, metadata.top_k)
        log_kept = probs.sum(-1).log()
        log_z = log_kept if log_z is None else log_z + log_kept
    tokens = inverse_cdf(probs, uniform(metadata.keys, metadata.indices))
    if metadata.greedy:
        tokens = torch.where(metadata.temperatures == 0, probs.argmax(-1), tokens)
    if full is not None and not metadata.top:
        return SamplerOutput(tokens, full.gather(-1, tokens[:, None])[:, 0].log(), log_z)
    logprobs = torch.log_softmax(scaled, -1)
    top = torch.topk(logprobs, min(metadata.top, logits.shape[-1]), -1) if metadata.top else None
    return SamplerOutput(
        tokens, logprobs.gather(-1, tokens[:, None])[:, 0], log_z, (top.indices, top.values) if top else None
    )


def apply_top_k_top_p(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Zero what top-k and then top-p cut. The most probable token always stays."""
    ranked, order = torch.sort(probs, dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    limit = torch.where(top_k > 0, top_k, probs.shape[-1])[:, None]
    ranked = ranked.masked_fill(rank >= limit, 0.0)
    before = ranked.cumsum(-1) - ranked
    over = before >= top_p[:, None] * ranked.sum(-1, keepdim=True)
    ranked = ranked.masked_fill(over & (top_p < 1)[:, None] & (rank > 0), 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, ranked)


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds u.

    In two levels, blocks and then tokens: one pass over the vocabulary instead of a long cumulative sum, and sums in
    float64 where rounding would starve the tail of a large vocabulary.
    """
    if probs.shape[-1] <= ONE_LEVEL_SIZE:
        return _search(probs, u, relative=True)[0]
    blocks = F.pad(probs, (0, -probs.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    block, rest = _search(blocks.sum(-1), u, relative=True)
    inside, _ = _search(blocks[torch.arange(len(probs), device=probs.device), block], rest, relative=False)
    return (block * BLOCK + inside).clamp(max=probs.shape[-1] - 1)


def _search(weights: Tensor, target: Tensor, relative: bool) -> tuple[Tensor, Tensor]:
    """Index of the first cumulative weight above the target, and what of the target is left inside it."""
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1]
    # Just under the total, so that rounding can never pick a weightless last entry.
    target = torch.minimum(target * total if relative else target, total * (1 - 1e-12))
    # Clamped for weights that are NaN and find no place: the engine refuses such tokens by their log probability.
    index = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=weights.shape[-1] - 1)
    below = torch.where(index > 0, cumulative.gather(-1, (index - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    return index, target - below
