"""The tokens of a micro-batch that train, and how far each has moved."""

from dataclasses import dataclass

from paceline.config.trainer import MAX_LOG_RATIO
from paceline.model.weights import Array
from paceline.trainer.ops import clip, isnan, ones_like, segment_sums, stop, take, where


@dataclass(frozen=True, slots=True)
class Ratio:
    """How far tokens have moved from an older policy's probabilities."""

    log: Array
    value: Array
    difference: Array
    """new - old in probability, without gradient."""

    @classmethod
    def of(cls, new: Array, old: Array) -> "Ratio":
        log = clip(new - old, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        return cls(log, log.exp(), stop(new).exp() - old.exp())

    def divergence(self) -> Array:
        """r - log r - 1: never negative, and zero only where nothing moved."""
        return self.value - self.log - 1


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Parallel one-dimensional arrays over the trained tokens of several sequences laid end to end."""

    logprobs: Array
    """log pi, the policy in training. It and `entropy` alone may have a gradient."""
    behaviour: Array
    """log mu, the policy that sampled; NaN where the sampler was frozen, which makes the ratio 1."""
    prox_logprobs: Array
    """The policy at the batch's start; NaN where it still is the policy in training."""
    advantages: Array
    ref_logprobs: Array
    """A teacher's."""
    base_logprobs: Array
    """The KL reference's; NaN where there is none."""
    rl_scale: Array
    ce_scale: Array
    ref_kl_scale: Array
    policy_scale: Array
    entropy: Array
    versions: Array
    segments: Array
    """Which sequence each token belongs to."""
    names: tuple[str, ...]
    """The name of each sequence in errors."""
    kv_kept: Array | None = None
    """Where the sampler's keys and values were partly those of older weights; nowhere when None."""

    @property
    def rl(self) -> Array:
        """Where the rl component trains."""
        return self.rl_scale != 0

    @property
    def sampler(self) -> Array:
        """log mu, the policy itself where the sampler was frozen."""
        return self._or_policy(self.behaviour)

    @property
    def start(self) -> Array:
        """The policy at the batch's start. In the first optimizer step that is the policy itself: no second pass."""
        return self._or_policy(self.prox_logprobs)

    @property
    def base(self) -> Array:
        return self._or_policy(self.base_logprobs)

    def per_sequence(self, values: Array) -> tuple[Array, Array]:
        """Sum over each sequence's rl tokens, and how many these are (1 at least)."""
        sums, counts = (
            segment_sums(where(self.rl, x, 0.0), self.segments, len(self.names)) for x in (values, ones_like(values))
        )
        return sums, clip(counts, low=1.0)

    def sequence_mean(self, values: Array) -> Array:
        """Each token's sequence's mean over its rl tokens."""
        sums, counts = self.per_sequence(values)
        return take(sums / counts, self.segments)

    def _or_policy(self, stream: Array) -> Array:
        return where(isnan(stream), stop(self.logprobs), stream)
