"""Samples tokens from logits: one uniform number and one inverse CDF per token.

The draws are the same as on every other device.

MLX has float64 on the CPU only, where the cumulative sums are made; memory is unified, so nothing is moved for it.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from paceline.engine.runner import SamplerOutput, SamplingMetadata
from paceline.weights.update import uniform_array

BLOCK = 256
ONE_LEVEL_SIZE = 1024
"""Vocabularies up to this size are searched in one level."""


def sample(logits: mx.array, metadata: SamplingMetadata) -> SamplerOutput:
    """Tokens with log-softmax(logits / T) over the full vocabulary. Temperature 0 is greedy, with logprobs at T = 1."""
    asked = mx.array(metadata.temperatures)
    scaled = logits / mx.where(asked == 0, 1.0, asked)[:, None]
    logprobs = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
    log_z = None
    if metadata.allowed_mask is None:
        probs = mx.softmax(scaled, axis=-1)
    else:
        # Scaled up before the exponential: all that a grammar allows may be too improbable for float32.
        allowed = mx.array(metadata.allowed_mask)
        kept = mx.where(allowed, logprobs, -mx.inf)
        log_z = mx.where(allowed.all(axis=-1), 0.0, mx.logsumexp(kept, axis=-1))
        probs = mx.exp(kept - log_z[:, None])
    if metadata.truncates:
        probs = apply_top_k_top_p(probs, mx.array(metadata.top_p), _top_k_limits(metadata.top_k, logits.shape[-1]))
        cut = mx.log(probs.sum(axis=-1))
        log_z = cut if log_z is None else log_z + cut
    tokens = inverse_cdf(probs, uniform_array(metadata.keys, metadata.indices))
    if metadata.greedy:
        tokens = mx.where(asked == 0, mx.argmax(probs, axis=-1).astype(tokens.dtype), tokens)
    drawn = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return SamplerOutput(tokens, drawn, log_z, _top_logprobs(logprobs, metadata.top) if metadata.top else None)


def token_logprobs(logits: mx.array, targets: Sequence[int], temperature: float) -> mx.array:
    """log-softmax(logits / T) of one given token a row."""
    scaled = logits / temperature
    chosen = mx.take_along_axis(scaled, mx.array(list(targets))[:, None], axis=-1)[:, 0]
    return chosen - mx.logsumexp(scaled, axis=-1)


def apply_top_k_top_p(probs: mx.array, top_p: mx.array, top_k: mx.array) -> mx.array:
    """Zero what top-k and then top-p cut; `top_k` counts all where nothing is cut. The most probable token always
    stays."""
    order = mx.argsort(-probs, axis=-1)
    ranked, rank = mx.take_along_axis(probs, order, axis=-1), mx.arange(probs.shape[-1])
    ranked = mx.where(rank >= top_k[:, None], 0.0, ranked)
    before = mx.cumsum(ranked, axis=-1) - ranked
    over = before >= top_p[:, None] * ranked.sum(axis=-1, keepdims=True)
    ranked = mx.where(over & (top_p < 1)[:, None] & (rank > 0), 0.0, ranked)
    return mx.put_along_axis(mx.zeros_like(probs), order, ranked, axis=-1)


def inverse_cdf(probs: mx.array, u: NDArray[np.float64]) -> mx.array:
    """The first token whose cumulative probability exceeds u.

    In two levels, blocks and then tokens: one pass over the vocabulary instead of a long cumulative sum, and sums in
    float64 where rounding would starve the tail of a large vocabulary.
    """
    rows, size = probs.shape
    target = mx.array(u, dtype=mx.float64)
    if size <= ONE_LEVEL_SIZE:
        return _search(probs, target, relative=True)[0]
    blocks = mx.pad(probs, [(0, 0), (0, -size % BLOCK)]).reshape(rows, -1, BLOCK)
    block, rest = _search(blocks.sum(axis=-1), target, relative=True)
    inside, _ = _search(blocks[mx.arange(rows), block], rest, relative=False)
    return mx.minimum(block * BLOCK + inside, size - 1)


def _search(weights: mx.array, target: mx.array, relative: bool) -> tuple[mx.array, mx.array]:
    """Index of the first cumulative weight above the target, and what of the target is left inside it."""
    with mx.stream(mx.cpu):
        cumulative = mx.cumsum(weights.astype(mx.float64), axis=-1)
        total = cumulative[:, -1]
        # Just under the total, so that rounding can never pick a weightless last entry.
        target = mx.minimum(target * total if relative else target, total * mx.array(1 - 1e-12, dtype=mx.float64))
        # Weights that are NaN find no place and count as the first: the engine refuses them by their log probability.
        index = mx.minimum((cumulative <= target[:, None]).sum(axis=-1).astype(mx.int32), weights.shape[-1] - 1)
        at = mx.take_along_axis(cumulative, mx.maximum(index - 1, 0)[:, None], axis=-1)[:, 0]
        return index, target - mx.where(index > 0, at, mx.zeros_like(at))


def _top_logprobs(logprobs: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The most probable tokens of each row and their log probabilities, best first."""
    count = min(count, logprobs.shape[-1])
    some = mx.argpartition(-logprobs, count - 1, axis=-1)[:, :count]
    values = mx.take_along_axis(logprobs, some, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(some, order, axis=-1), mx.take_along_axis(values, order, axis=-1)


def _top_k_limits(top_k: NDArray[np.int64], vocabulary: int) -> mx.array:
    return mx.array(np.where(top_k > 0, np.minimum(top_k, vocabulary), vocabulary).astype(np.int32))
