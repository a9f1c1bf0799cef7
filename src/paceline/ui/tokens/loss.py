"""Computes the loss of one token in plain Python: the terms of `paceline.trainer.terms` without torch.

The record holds the sampler's log probability and not the trainer's, so the ratio r = pi / old is known only where it
must be 1. Elsewhere a card shows the term at r = 1, where the policy stands if it has not moved since, and from where
on a bound would hold the token back. Tests hold every term to the trainer's own.
"""

import math
from dataclasses import dataclass

from paceline.config import trainer as config
from paceline.config.trainer import MAX_LOG_RATIO, REF_KL_TRUST
from paceline.ui.tokens.credit import CardLine, figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """The known values of one token that trains. Log probabilities are at the sampling temperature."""

    advantage: float | None = None
    old: float | None = None
    """log of what the ratio is measured from; None where it was not kept."""
    ref: float | None = None
    base: float | None = None


def rl_term(c: config.LossConfig, a: float, log_pi: float, log_old: float, log_s: float = 0.0) -> tuple[float, bool]:
    """The unscaled loss, and whether a bound held the token back. `log_s` is a sequence's mean log ratio, for gspo."""
    log_r = max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, log_pi - log_old))
    r = math.exp(log_r)
    match c:
        case config.DPPOConfig():
            d = math.exp(log_pi) - math.exp(log_old)
            left = (a > 0 and d > c.high) or (a < 0 and d < -c.low)
            return (0.0 if left else -a * r) + c.kl_tau * log_r**2, left
        case config.PPOConfig():
            loss, left = _clipped(r, a, c.clip_low, c.clip_high)
            if c.dual_clip is not None and a < 0 and loss > -a * c.dual_clip:
                return -a * c.dual_clip, True
            return loss, left
        case config.GSPOConfig():
            return _clipped(math.exp(log_s), a, c.clip_low, c.clip_high)
        case config.CISPOConfig():
            bounded = min(max(r, c.min_ratio), c.max_ratio)
            return -bounded * a * log_pi, bounded != r
        case config.ReinforceConfig():
            weight = 1.0 if c.max_ratio is None else min(r, c.max_ratio)
            return -weight * a * log_pi, c.max_ratio is not None and weight != r
    raise ValueError(f"the terms of a loss of type {c.type} are unknown")


def ref_kl_term(log_pi: float, log_mu: float, ref: float) -> tuple[float, bool]:
    """Reverse KL to a teacher, with the ratio to the sampler."""
    pull, d = ref - log_pi, math.exp(log_pi) - math.exp(log_mu)
    left = d > REF_KL_TRUST if pull > 0 else d < -REF_KL_TRUST
    r = math.exp(max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, log_pi - log_mu)))
    return (0.0 if left else -pull * r), left


def kl_term(kind: str, log_pi: float, base: float) -> float:
    """The estimators k1, k2, k3 of the divergence from a reference."""
    d = max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, log_pi - base))
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1}[kind]


def _clipped(r: float, a: float, low: float, high: float) -> tuple[float, bool]:
    plain, bounded = -a * r, -a * min(max(r, 1 - low), 1 + high)
    return max(plain, bounded), bounded > plain


FORMULAS = {
    "dppo": "−A · r + kl_tau · (log r)²",
    "ppo": "−min(r · A, clip(r) · A)",
    "gspo": "−min(s · A, clip(s) · A), s the sequence's ratio",
    "cispo": "−clip(r) · A · log π",
    "reinforce": "−A · log π",
}


def rl_line(c: config.LossConfig, token: Token) -> CardLine:
    """The rl term at r = 1."""
    a = token.advantage
    if isinstance(c, config.CustomLossConfig):
        return CardLine(name="rl term", formula=f"given by {c.import_path}", replay=True)
    formula = FORMULAS[c.type]
    if isinstance(c, config.ReinforceConfig) and c.max_ratio is not None:
        formula = "−min(r, max_ratio) · A · log π"
    if a is None:
        return CardLine(name="rl term", formula=formula, note="Its advantage is made at train time.", replay=True)
    needs = isinstance(c, config.CISPOConfig | config.ReinforceConfig)
    if needs and token.old is None:
        return CardLine(
            name="rl term", formula=formula, note="The sampler's log probability was not kept.", replay=True
        )
    log_pi = token.old if token.old is not None else 0.0
    value, _ = rl_term(c, a, log_pi, log_pi)
    numbers = f"−({figure(a)}) · {figure(log_pi)}" if needs else f"−({figure(a)}) · 1"
    return CardLine(name="rl term at r = 1", formula=formula, numbers=numbers, value=value)


def bound(c: config.LossConfig, token: Token) -> str:
    """From where on the rl term leaves the token out, or holds it."""
    a = token.advantage
    if not a or token.old is None:
        return ""
    mu = math.exp(token.old)
    up = a > 0
    match c:
        case config.DPPOConfig():
            edge = mu + c.high if up else mu - c.low
            key = "trainer.loss.high" if up else "trainer.loss.low"
            return _edge("Dropped from the policy term", edge, up, f"μ {figure(mu)} {'+' if up else '−'} {key}")
        case config.PPOConfig():
            edge = mu * (1 + c.clip_high) if up else mu * (1 - c.clip_low)
            key = "clip_high" if up else "clip_low"
            return _edge("Clipped, so without a gradient,", edge, up, f"μ {figure(mu)}, trainer.loss.{key}")
        case config.GSPOConfig():
            side = f"above {figure(1 + c.clip_high)}" if up else f"below {figure(1 - c.clip_low)}"
            return f"The whole sequence is clipped once its ratio s is {side}."
        case config.CISPOConfig():
            return f"Its weight is held within {figure(c.min_ratio)} and {figure(c.max_ratio)}; no token is left out."
        case config.ReinforceConfig() if c.max_ratio is not None:
            return f"Its weight is at most {figure(c.max_ratio)}; no token is left out."
    return ""


def _edge(what: str, edge: float, up: bool, made: str) -> str:
    if (edge >= 1) if up else (edge <= 0):
        return f"No bound can hold it: its probability cannot {'rise' if up else 'fall'} so far ({made})."
    return f"{what} once π is {'above' if up else 'below'} {figure(edge)} ({made})."


def ref_kl_line(token: Token) -> CardLine:
    """A teacher's pull at r = 1."""
    formula = "−(log teacher − log π) · r"
    if token.ref is None or token.old is None:
        return CardLine(name="ref_kl term", formula=formula, note="The teacher's or the sampler's score was not kept.")
    value, _ = ref_kl_term(token.old, token.old, token.ref)
    numbers = f"−({figure(token.ref)} − {figure(token.old)})"
    mu, up = math.exp(token.old), token.ref > token.old
    edge = _edge("Dropped", mu + REF_KL_TRUST if up else mu - REF_KL_TRUST, up, f"μ {figure(mu)}, trust {REF_KL_TRUST}")
    return CardLine(name="ref_kl term at r = 1", formula=formula, numbers=numbers, value=value, note=edge)


def kl_line(c: config.KLConfig, token: Token) -> CardLine:
    """The pull of the KL reference in the loss, at r = 1."""
    shape = {"k1": "d", "k2": "d² / 2", "k3": "e^−d + d − 1"}[c.kind]
    formula = f"kl.coef · ({shape}), d = log π − log reference"
    if token.base is None or token.old is None:
        return CardLine(name="kl term", formula=formula, note="The reference is scored at train time.", replay=True)
    value = c.coef * kl_term(c.kind, token.old, token.base)
    numbers = f"{figure(c.coef)} · {c.kind}(d = {figure(token.old - token.base)})"
    return CardLine(name="kl term at r = 1", formula=formula, numbers=numbers, value=value)
