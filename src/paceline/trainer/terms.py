"""What one token's loss is: a pure function of how far it has moved and of its advantage.

`pi` is the policy in training, `mu` the policy that sampled, both at the sampling temperature. A term sees the ratio
r = pi / old, where old is mu, or under `proximal` the policy at the batch's start. sg[...] stops the gradient. Each
term answers with the loss per token and with where a bound held the token back. Which tokens it is used on, and by what
they are divided, is decided elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.config import trainer as config
from paceline.data.importing import import_object
from paceline.trainer.base import TrainerError
from paceline.trainer.tokens import MAX_LOG_RATIO, Ratio, Tokens

REF_KL_TRUST = 0.2

RLTerm = Callable[[Ratio, Tokens], tuple[Tensor, Tensor]]


def dppo(c: config.DPPO) -> RLTerm:
    """Policy gradient with a trust region on the difference of probabilities d: -keep * A * r + tau * (log r)^2.

    A token is dropped once its probability has already moved far enough the way its advantage pushes. Rare tokens have
    huge ratios and tiny differences; masking by d keeps them, where ratio clipping would throw away exactly the
    exploratory ones. The square holds all rl tokens near the sampler, dropped ones too.
    """

    def term(ratio: Ratio, tokens: Tokens) -> tuple[Tensor, Tensor]:
        a, d = tokens.advantages, ratio.difference
        left = ((a > 0) & (d > c.high)) | ((a < 0) & (d < -c.low))
        return -(~left).float() * a * ratio.value + c.kl_tau * ratio.log.square(), left

    return term


def ppo(c: config.PPO) -> RLTerm:
    """The clipped surrogate -min(r A, clip(r) A) (arXiv 1707.06347); its two bounds may differ, as in DAPO (arXiv
    2503.14476). The dual clip (arXiv 1912.09729) also bounds what one token of negative advantage can cost."""

    def term(ratio: Ratio, tokens: Tokens) -> tuple[Tensor, Tensor]:
        a = tokens.advantages
        loss, left = _clipped(ratio.value, a, c.clip_low, c.clip_high)
        if c.dual_clip is not None:
            ceiling = torch.where(a < 0, -a * c.dual_clip, torch.inf)
            loss, left = torch.minimum(loss, ceiling), left | (loss > ceiling)
        return loss, left

    return term


def gspo(c: config.GSPO) -> RLTerm:
    """PPO's clip on the sequence's ratio s = exp(mean of log r over its rl tokens) (arXiv 2507.18071).

    The reward judges the whole sequence, so the whole sequence is inside the trust region or outside. Written per token
    as sg[s] * pi / sg[pi]: the same value everywhere in the sequence, and the gradient reaches each token.
    """

    def term(ratio: Ratio, tokens: Tokens) -> tuple[Tensor, Tensor]:
        s = tokens.sequence_mean(ratio.log.detach()).exp()
        here = (tokens.logprobs - tokens.logprobs.detach()).exp()
        return _clipped(s * here, tokens.advantages, c.clip_low, c.clip_high)

    return term


def cispo(c: config.CISPO) -> RLTerm:
    """-sg[clip(r)] * A * log pi (arXiv 2506.13585): the weight is clipped and not the update, so the rare tokens that
    turn a line of thought, whose ratios leave every range first, still learn."""

    def term(ratio: Ratio, tokens: Tokens) -> tuple[Tensor, Tensor]:
        r = ratio.value.detach()
        bounded = r.clamp(c.min_ratio, c.max_ratio)
        return -bounded * tokens.advantages * tokens.logprobs, bounded != r

    return term


def reinforce(c: config.Reinforce) -> RLTerm:
    """-A log pi (Williams 1992): right when the policy itself has just sampled.

    For older samples `max_ratio` weighs tokens by sg[min(r, max_ratio)], a truncated importance weight: unbiased up to
    the cap, which bounds the variance.
    """

    def term(ratio: Ratio, tokens: Tokens) -> tuple[Tensor, Tensor]:
        r = ratio.value.detach()
        weight = torch.ones_like(r) if c.max_ratio is None else r.clamp(max=c.max_ratio)
        return -weight * tokens.advantages * tokens.logprobs, (weight != r) & (c.max_ratio is not None)

    return term


@dataclass(frozen=True, slots=True)
class Streams:
    """What a custom loss sees: one sequence's rl tokens, in order, as tensors of one length."""

    logprobs: Tensor
    """log pi: the only one with a gradient."""
    behaviour_logprobs: Tensor
    """The sampler's; the policy's own where the sampler was frozen."""
    log_ratio: Tensor
    """log pi - log old, clamped, with its gradient. old is the sampler, or under `proximal` the batch's start."""
    advantages: Tensor
    ref_logprobs: Tensor
    base_logprobs: Tensor
    """The KL reference's; the policy's own where there is none."""
    versions: Tensor


def custom(c: config.CustomLoss) -> RLTerm:
    """The user's `fn(streams, **kwargs)`, called once per sequence; it gives one loss per rl token."""
    fn = import_object(c.import_path)

    def term(ratio: Ratio, tokens: Tokens) -> tuple[Tensor, Tensor]:
        loss = torch.zeros_like(tokens.logprobs)
        columns = (tokens.logprobs, tokens.sampler, ratio.log, tokens.advantages, tokens.ref_logprobs, tokens.base)
        for number, name in enumerate(tokens.names):
            at = (tokens.rl & (tokens.segments == number)).nonzero()[:, 0]
            if len(at):
                given = fn(Streams(*(x[at] for x in (*columns, tokens.versions))), **c.kwargs)
                loss = loss.index_copy(0, at, _aligned(given, at, name, c.import_path).to(loss.dtype))
        return loss, torch.zeros_like(tokens.rl)

    return term


def _aligned(given: object, at: Tensor, name: str, path: str) -> Tensor:
    if not isinstance(given, Tensor):
        raise TrainerError(f"{name}: the loss `{path}` must give a torch tensor, not {type(given).__name__}")
    if given.shape != at.shape:
        shape = f"{given.shape[0]} values" if given.ndim == 1 else f"a tensor of shape {list(given.shape)}"
        raise TrainerError(f"{name}: the loss `{path}` gave {shape} for {len(at)} rl tokens; give one per token")
    return given


def rl_term(c: config.LossConfig) -> RLTerm:
    """The configured rl term, picked once."""
    match c:
        case config.DPPO():
            return dppo(c)
        case config.PPO():
            return ppo(c)
        case config.GSPO():
            return gspo(c)
        case config.CISPO():
            return cispo(c)
        case config.Reinforce():
            return reinforce(c)
        case config.CustomLoss():
            return custom(c)


def _clipped(r: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    plain, bounded = -advantages * r, -advantages * r.clamp(1 - low, 1 + high)
    return torch.maximum(plain, bounded), bounded > plain


def ref_kl_term(ratio: Ratio, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Reverse KL to a teacher as a policy gradient: -sg[log ref - log pi] * r, in the same trust region as dppo.
    The ratio is to the sampler."""
    pull = (tokens.ref_logprobs - tokens.logprobs).detach()
    left = torch.where(pull > 0, ratio.difference > REF_KL_TRUST, ratio.difference < -REF_KL_TRUST)
    return -(~left).float() * pull * ratio.value, left


def importance(c: config.Proximal, tokens: Tokens) -> Tensor:
    """sg[min(rho, cap)] with rho = start / mu: the decoupled objective (arXiv 2110.00641, for language models
    2505.24298) steps from the batch's start, and this weight says who really sampled.

    At sequence level rho is the product over the sequence's rl tokens, or their geometric mean. A frozen sampler has no
    rho; the policy, which stands in for it elsewhere, has left the start behind.
    """
    log = torch.where(tokens.behaviour.isnan(), 0.0, tokens.start - tokens.sampler).detach()
    if c.level == "sequence":
        sums, counts = tokens.per_sequence(log)
        log = (sums / counts if c.geometric else sums).index_select(0, tokens.segments)
    return log.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=c.cap)


def k1(logprobs: Tensor, base: Tensor) -> Tensor:
    """d = log pi - log ref. Its own derivative, that of log pi, averages to zero whatever the reference says; the
    gradient of its mean is d * grad log pi, so that is the gradient it gets."""
    d = _log_difference(logprobs, base).detach()
    return d * (1 + logprobs - logprobs.detach())


def k2(logprobs: Tensor, base: Tensor) -> Tensor:
    """d^2 / 2: biased as a value, and differentiating it plainly gives the same d * grad log pi (arXiv 2510.01555)."""
    return _log_difference(logprobs, base).square() / 2


def k3(logprobs: Tensor, base: Tensor) -> Tensor:
    """e^-d + d - 1: unbiased and never negative, the penalty of GRPO (arXiv 2402.03300)."""
    d = _log_difference(logprobs, base)
    return (-d).exp() + d - 1


KL_TERMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def _log_difference(logprobs: Tensor, base: Tensor) -> Tensor:
    return (logprobs - base).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
