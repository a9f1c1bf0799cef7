"""From logits to tokens: one uniform number and one inverse CDF per token, the same as on every other device.

MLX has float64 on the CPU only, where the cumulative sums are made; memory is unified, so nothing is moved for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from paceline.engine.sequence import Chunk, Guide
from paceline.weights.bits import uniform_array

BLOCK = 256
SMALL = 1024
"""Vocabularies up to this size are searched in one level."""


@dataclass(frozen=True, slots=True)
class MlxSamplingMetadata:
    """How each row is sampled; one entry per row of the logits."""

    temperatures: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    keys: NDArray[np.int64]
    indices: NDArray[np.int64]
    truncates: bool
    """Whether any row uses top-p or top-k: sorting the vocabulary is skipped when none does."""
    greedy: bool
    """Whether any row has temperature 0."""
    top: int = 0
    """Most alternatives any row wants to hear of."""
    allowed: NDArray[np.bool_] | None = None
    """Tokens that a grammar allows each row."""

    @classmethod
    def of(cls, chunks: Sequence[Chunk], vocabulary: int) -> "MlxSamplingMetadata":
        requests = [chunk.sequence.request for chunk in chunks]
        guides = [chunk.sequence.guide for chunk in chunks]
        return cls(
            temperatures=np.array([r.temperature for r in requests], np.float32),
            top_p=np.array([r.top_p for r in requests], np.float32),
            top_k=np.array([r.top_k for r in requests], np.int64),
            keys=np.array([r.noise for r in requests], np.int64),
            indices=np.array([chunk.index for chunk in chunks], np.int64),
            truncates=any(r.top_p < 1 or r.top_k for r in requests),
            greedy=any(r.temperature == 0 for r in requests),
            top=max(r.top_logprobs for r in requests),
            allowed=np.stack([_allowed(guide, vocabulary) for guide in guides]) if any(guides) else None,
        )


class MlxSamplerOutput(NamedTuple):
    tokens: mx.array
    logprobs: mx.array
    log_z: mx.array | None = None
    top: tuple[mx.array, mx.array] | None = None

    @property
    def arrays(self) -> list[mx.array]:
        return [array for array in (self.tokens, self.logprobs, self.log_z, *(self.top or ())) if array is not None]


def sample(logits: mx.array, draw: MlxSamplingMetadata) -> MlxSamplerOutput:
    """Tokens with log-softmax(logits / T) over the full vocabulary. Temperature 0 is greedy, with logprobs at T = 1."""
    asked = mx.array(draw.temperatures)
    scaled = logits / mx.where(asked == 0, 1.0, asked)[:, None]
    logprobs = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
    log_z = None
    if draw.allowed is None:
        probs = mx.softmax(scaled, axis=-1)
    else:
        # Scaled up before the exponential: all that a grammar allows may be too improbable for float32.
        allowed = mx.array(draw.allowed)
        kept = mx.where(allowed, logprobs, -mx.inf)
        log_z = mx.where(allowed.all(axis=-1), 0.0, mx.logsumexp(kept, axis=-1))
        probs = mx.exp(kept - log_z[:, None])
    if draw.truncates:
        probs = keep_top(probs, mx.array(draw.top_p), _ranks(draw.top_k, logits.shape[-1]))
        cut = mx.log(probs.sum(axis=-1))
        log_z = cut if log_z is None else log_z + cut
    tokens = inverse_cdf(probs, uniform_array(draw.keys, draw.indices))
    if draw.greedy:
        tokens = mx.where(asked == 0, mx.argmax(probs, axis=-1).astype(tokens.dtype), tokens)
    drawn = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return MlxSamplerOutput(tokens, drawn, log_z, _best(logprobs, draw.top) if draw.top else None)


def token_logprobs(logits: mx.array, targets: Sequence[int], temperature: float) -> mx.array:
    """log-softmax(logits / T) of one given token a row."""
    scaled = logits / temperature
    chosen = mx.take_along_axis(scaled, mx.array(list(targets))[:, None], axis=-1)[:, 0]
    return chosen - mx.logsumexp(scaled, axis=-1)


def keep_top(probs: mx.array, top_p: mx.array, top_k: mx.array) -> mx.array:
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
    if size <= SMALL:
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


def _best(logprobs: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The most probable tokens of each row and their log probabilities, best first."""
    count = min(count, logprobs.shape[-1])
    some = mx.argpartition(-logprobs, count - 1, axis=-1)[:, :count]
    values = mx.take_along_axis(logprobs, some, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(some, order, axis=-1), mx.take_along_axis(values, order, axis=-1)


def _ranks(top_k: NDArray[np.int64], vocabulary: int) -> mx.array:
    return mx.array(np.where(top_k > 0, np.minimum(top_k, vocabulary), vocabulary).astype(np.int32))


def _allowed(guide: Guide | None, vocabulary: int) -> NDArray[np.bool_]:
    return np.ones(vocabulary, np.bool_) if guide is None else np.asarray(guide.allowed(vocabulary))
