"""The tokens of a micro-batch that train, and how far each has moved."""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Exponents are clamped to this much either way: e^20 is far outside any trust region, and still a number."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How far tokens have moved from an older policy's probabilities."""

    log: Tensor
    value: Tensor
    difference: Tensor
    """new - old in probability, without gradient."""

    @classmethod
    def of(cls, new: Tensor, old: Tensor) -> "Ratio":
        log = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return cls(log, log.exp(), new.detach().exp() - old.exp())

    def divergence(self) -> Tensor:
        """r - log r - 1: never negative, and zero only where nothing moved."""
        return self.value - self.log - 1


@dataclass(frozen=True, slots=True)
class Tokens:
    """Parallel one-dimensional tensors over the trained tokens of several sequences laid end to end."""

    logprobs: Tensor
    """log pi, the policy in training. It and `entropy` alone may have a gradient."""
    behaviour: Tensor
    """log mu, the policy that sampled; NaN where the sampler was frozen, which makes the ratio 1."""
    prox_logprobs: Tensor
    """The policy at the batch's start; NaN where it still is the policy in training."""
    advantages: Tensor
    ref_logprobs: Tensor
    """A teacher's."""
    base_logprobs: Tensor
    """The KL reference's; NaN where there is none."""
    rl_scale: Tensor
    ce_scale: Tensor
    ref_kl_scale: Tensor
    policy_scale: Tensor
    entropy: Tensor
    versions: Tensor
    segments: Tensor
    """Which sequence each token belongs to."""
    names: tuple[str, ...]
    """What each sequence is called in an error."""

    @property
    def rl(self) -> Tensor:
        """Where the rl component trains."""
        return self.rl_scale != 0

    @property
    def sampler(self) -> Tensor:
        """log mu, the policy itself where the sampler was frozen."""
        return self._or_policy(self.behaviour)

    @property
    def start(self) -> Tensor:
        """The policy at the batch's start. In the first optimizer step that is the policy itself: no second pass."""
        return self._or_policy(self.prox_logprobs)

    @property
    def base(self) -> Tensor:
        return self._or_policy(self.base_logprobs)

    def per_sequence(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over each sequence's rl tokens, and how many these are (1 at least)."""
        zeros = values.new_zeros(len(self.names))
        sums = zeros.index_add(0, self.segments, torch.where(self.rl, values, 0.0))
        counts = zeros.index_add(0, self.segments, self.rl.to(values.dtype))
        return sums, counts.clamp(min=1.0)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Each token's sequence's mean over its rl tokens."""
        sums, counts = self.per_sequence(values)
        return (sums / counts).index_select(0, self.segments)

    def _or_policy(self, stream: Tensor) -> Tensor:
        return torch.where(stream.isnan(), self.logprobs.detach(), stream)
