"""The loss: one sum over three components, each token already scaled by its normaliser.

    sum_t  rl_scale_t * rl_t  +  ce_scale_t * ce_t  +  ref_kl_scale_t * ref_kl_t

`pi` is the policy being trained, `mu` the policy that sampled (the *behaviour*), both at the sampling temperature;
r = pi / mu, and d = pi - mu is the difference of probabilities. Which token carries which scale is the algorithm's
choice, made long before; nothing here knows its name.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from paceline.config import trainer as config

MAX_LOG_RATIO = 20.0
REF_KL_TRUST = 0.2


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a micro-batch that train, as parallel one-dimensional tensors."""

    logprobs: Tensor
    """log pi, the only one with a gradient."""
    behaviour: Tensor
    """log mu; NaN where the sampler was frozen, which makes the ratio 1."""
    advantages: Tensor
    ref_logprobs: Tensor
    rl_scale: Tensor
    ce_scale: Tensor
    ref_kl_scale: Tensor
    entropy: Tensor
    versions: Tensor

    def ratio(self) -> "Ratio":
        pi = self.logprobs
        mu = torch.where(self.behaviour.isnan(), pi.detach(), self.behaviour)
        log_ratio = (pi - mu).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return Ratio(log_ratio, log_ratio.exp(), pi.detach().exp() - mu.exp())


@dataclass(frozen=True, slots=True)
class Ratio:
    """How far a token has moved since it was sampled."""

    log: Tensor
    value: Tensor
    difference: Tensor
    """pi - mu in probability, without gradient."""


RLTerm = Callable[[Ratio, Tensor], tuple[Tensor, Tensor]]
"""(ratio, advantages) -> (loss, whether the token left the trust region), per token."""


def dppo(c: config.DPPO) -> RLTerm:
    """Policy gradient with a trust region on the probability difference d: -keep * A * r + tau * (log r)^2.

    A token is dropped once its probability has already moved far enough the way its advantage pushes. Rare tokens have
    huge ratios and tiny differences; masking by d keeps them, where ratio clipping would throw away exactly the
    exploratory ones. The square holds all rl tokens near the sampler, dropped ones too.
    """

    def term(ratio: Ratio, advantages: Tensor) -> tuple[Tensor, Tensor]:
        d = ratio.difference
        left = ((advantages > 0) & (d > c.high)) | ((advantages < 0) & (d < -c.low))
        return -(~left).float() * advantages * ratio.value + c.kl_tau * ratio.log.square(), left

    return term


def ppo(c: config.PPO) -> RLTerm:
    """The clipped surrogate -min(r A, clip(r) A) (arXiv 1707.06347), with the dual clip of arXiv 1912.09729."""

    def term(ratio: Ratio, advantages: Tensor) -> tuple[Tensor, Tensor]:
        clipped = ratio.value.clamp(1 - c.clip_low, 1 + c.clip_high)
        plain, bounded = -advantages * ratio.value, -advantages * clipped
        loss, left = torch.maximum(plain, bounded), bounded > plain
        if c.dual_clip is not None:
            ceiling = torch.where(advantages < 0, -advantages * c.dual_clip, torch.inf)
            loss, left = torch.minimum(loss, ceiling), left | (loss > ceiling)
        return loss, left

    return term


def rl_term(c: config.LossConfig) -> RLTerm:
    """The configured rl term, picked once."""
    return dppo(c) if isinstance(c, config.DPPO) else ppo(c)


def ref_kl_term(ratio: Ratio, logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Reverse KL to a reference as a policy gradient: -sg[log ref - log pi] * r, in the same trust region as dppo."""
    pull = (ref_logprobs - logprobs).detach()
    left = torch.where(pull > 0, ratio.difference > REF_KL_TRUST, ratio.difference < -REF_KL_TRUST)
    return -(~left).float() * pull * ratio.value, left


class Loss:
    """Adds the components up and keeps the sums that the step's metrics are made of."""

    def __init__(self, c: config.LossConfig) -> None:
        self._rl = rl_term(c)

    def __call__(self, tokens: Tokens, version: int) -> tuple[Tensor, "Sums"]:
        """The scaled loss of these tokens, and unscaled sums for the report."""
        ratio = tokens.ratio()
        rl, rl_left = self._rl(ratio, tokens.advantages)
        ref_kl, ref_left = ref_kl_term(ratio, tokens.logprobs, tokens.ref_logprobs)
        ce = -tokens.logprobs
        # Where a scale is zero its term may be infinite or NaN (an absent stream), and 0 * inf is NaN.
        parts = [
            torch.where(scale != 0, term, 0.0) * scale
            for term, scale in ((rl, tokens.rl_scale), (ce, tokens.ce_scale), (ref_kl, tokens.ref_kl_scale))
        ]
        with torch.no_grad():
            sums = Sums.of(tokens, ratio, parts, rl_left, ref_left, version)
        return torch.stack([part.sum() for part in parts]).sum(), sums


@dataclass(slots=True)
class Sums:
    """Sums over tokens, added over micro-batches and divided once."""

    loss_rl: Tensor
    loss_ce: Tensor
    loss_ref_kl: Tensor
    rl: Tensor
    ce: Tensor
    ref_kl: Tensor
    ratio: Tensor
    kl: Tensor
    clipped: Tensor
    entropy: Tensor
    fresh: Tensor
    mismatch: Tensor
    nll: Tensor
    pull: Tensor
    ref_kl_clipped: Tensor

    @classmethod
    def of(
        cls, tokens: Tokens, ratio: Ratio, parts: list[Tensor], rl_left: Tensor, ref_left: Tensor, version: int
    ) -> "Sums":
        rl, ce, ref = (scale != 0 for scale in (tokens.rl_scale, tokens.ce_scale, tokens.ref_kl_scale))
        fresh = rl & (tokens.versions == version)
        kl = ratio.value - ratio.log - 1

        def over(mask: Tensor, values: Tensor) -> Tensor:
            return torch.where(mask, values, 0.0).sum(dtype=torch.float64)

        return cls(
            *(part.sum(dtype=torch.float64) for part in parts),
            *(mask.sum(dtype=torch.float64) for mask in (rl, ce, ref)),
            ratio=over(rl, ratio.value),
            kl=over(rl, kl),
            clipped=over(rl, rl_left.float()),
            entropy=over(rl, tokens.entropy),
            fresh=fresh.sum(dtype=torch.float64),
            mismatch=over(fresh, kl),
            nll=over(ce, -tokens.logprobs),
            pull=over(ref, tokens.logprobs - tokens.ref_logprobs),
            ref_kl_clipped=over(ref, ref_left.float()),
        )

    def add(self, other: "Sums") -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def metrics(self) -> dict[str, float]:
        """Means under their public names; components without tokens are left out."""
        s = dict(
            zip(
                (f.name for f in fields(self)),
                torch.stack([getattr(self, f.name) for f in fields(self)]).tolist(),
                strict=True,
            )
        )
        out = {"loss": s["loss_rl"] + s["loss_ce"] + s["loss_ref_kl"]}
        if s["rl"]:
            out |= {"loss/rl": s["loss_rl"], "ratio": s["ratio"] / s["rl"], "ppo_kl": s["kl"] / s["rl"]}
            out |= {"clip_fraction": s["clipped"] / s["rl"], "entropy": s["entropy"] / s["rl"]}
        if s["fresh"]:
            out["mismatch_kl"] = s["mismatch"] / s["fresh"]
        if s["ce"]:
            out |= {"loss/ce": s["loss_ce"], "nll": s["nll"] / s["ce"]}
        if s["ref_kl"]:
            out |= {"loss/ref_kl": s["loss_ref_kl"], "ref_kl": s["pull"] / s["ref_kl"]}
            out["ref_kl/clip_fraction"] = s["ref_kl_clipped"] / s["ref_kl"]
        return out
