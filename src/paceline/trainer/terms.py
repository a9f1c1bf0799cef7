"""Per-token loss terms: pure functions of a token's ratio and its advantage.

`pi` is the policy in training, `mu` the policy that sampled, both at the sampling temperature. A term sees the ratio
r = pi / old, where old is mu, or under `proximal` the policy at the batch's start. sg[...] stops the gradient. Each
term answers with the loss per token and with where a bound held the token back. Which tokens it is used on, and by what
they are divided, is decided elsewhere. Arrays are those of the tokens' library (`ops.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from paceline.config import trainer as config
from paceline.config.trainer import MAX_LOG_RATIO, REF_KL_TRUST
from paceline.trainer.base import TrainerError
from paceline.trainer.batch import Ratio, TrainedTokens
from paceline.trainer.ops import (
    called,
    clip,
    isnan,
    maximum,
    minimum,
    ones_like,
    places,
    put,
    stop,
    take,
    where,
    zeros_like,
)
from paceline.util.importing import import_object
from paceline.util.user_code import user_code
from paceline.weights.update import Array

RLTerm = Callable[[Ratio, TrainedTokens], tuple[Array, Array]]


def dppo(c: config.DPPOConfig) -> RLTerm:
    """Policy gradient with a trust region on the difference of probabilities d: -keep * A * r + tau * (log r)^2.

    A token is dropped once its probability has already moved far enough the way its advantage pushes. Rare tokens have
    huge ratios and tiny differences; masking by d keeps them, where ratio clipping would throw away exactly the
    exploratory ones. The square holds all rl tokens near the sampler, dropped ones too.
    """

    def term(ratio: Ratio, tokens: TrainedTokens) -> tuple[Array, Array]:
        a, d = tokens.advantages, ratio.difference
        left = ((a > 0) & (d > c.high)) | ((a < 0) & (d < -c.low))
        return -a * ratio.value * ~left + c.kl_tau * ratio.log.square(), left

    return term


def ppo(c: config.PPOConfig) -> RLTerm:
    """The clipped surrogate -min(r A, clip(r) A) (arXiv 1707.06347); its two bounds may differ, as in DAPO (arXiv
    2503.14476). The dual clip (arXiv 1912.09729) also bounds what one token of negative advantage can cost."""

    def term(ratio: Ratio, tokens: TrainedTokens) -> tuple[Array, Array]:
        a = tokens.advantages
        loss, left = _clipped(ratio.value, a, c.clip_low, c.clip_high)
        if c.dual_clip is not None:
            ceiling = where(a < 0, -a * c.dual_clip, inf)
            loss, left = minimum(loss, ceiling), left | (loss > ceiling)
        return loss, left

    return term


def gspo(c: config.GSPOConfig) -> RLTerm:
    """PPO's clip on the sequence's ratio s = exp(mean of log r over its rl tokens) (arXiv 2507.18071).

    The reward judges the whole sequence, so the whole sequence is inside the trust region or outside. Written per token
    as sg[s] * pi / sg[pi]: the same value everywhere in the sequence, and the gradient reaches each token.
    """

    def term(ratio: Ratio, tokens: TrainedTokens) -> tuple[Array, Array]:
        s = tokens.sequence_mean(stop(ratio.log)).exp()
        here = (tokens.logprobs - stop(tokens.logprobs)).exp()
        return _clipped(s * here, tokens.advantages, c.clip_low, c.clip_high)

    return term


def cispo(c: config.CISPOConfig) -> RLTerm:
    """-sg[clip(r)] * A * log pi (arXiv 2506.13585): the weight is clipped and not the update, so the rare tokens that
    turn a line of thought, whose ratios leave every range first, still learn."""

    def term(ratio: Ratio, tokens: TrainedTokens) -> tuple[Array, Array]:
        r = stop(ratio.value)
        bounded = clip(r, c.min_ratio, c.max_ratio)
        return -bounded * tokens.advantages * tokens.logprobs, bounded != r

    return term


def reinforce(c: config.ReinforceConfig) -> RLTerm:
    """-A log pi (Williams 1992): right when the policy itself has just sampled.

    For older samples `max_ratio` weighs tokens by sg[min(r, max_ratio)], a truncated importance weight: unbiased up to
    the cap, which bounds the variance.
    """

    def term(ratio: Ratio, tokens: TrainedTokens) -> tuple[Array, Array]:
        r = stop(ratio.value)
        weight = ones_like(r) if c.max_ratio is None else clip(r, high=c.max_ratio)
        return -weight * tokens.advantages * tokens.logprobs, (weight != r) & (c.max_ratio is not None)

    return term


@dataclass(frozen=True, slots=True)
class Streams:
    """Input of a custom loss: one sequence's rl tokens, in order, as arrays of one length in the trainer's library."""

    logprobs: Array
    """log pi: the only one with a gradient."""
    behaviour_logprobs: Array
    """The sampler's; the policy's own where the sampler was frozen."""
    log_ratio: Array
    """log pi - log old, clamped, with its gradient. old is the sampler, or under `proximal` the batch's start."""
    advantages: Array
    ref_logprobs: Array
    base_logprobs: Array
    """The KL reference's; the policy's own where there is none."""
    versions: Array


def custom(c: config.CustomLossConfig) -> RLTerm:
    """The user's `fn(streams, **kwargs)`, called once per sequence; it gives one loss per rl token."""
    fn = import_object(c.import_path)

    def term(ratio: Ratio, tokens: TrainedTokens) -> tuple[Array, Array]:
        loss = zeros_like(tokens.logprobs)
        columns = (tokens.logprobs, tokens.sampler, ratio.log, tokens.advantages, tokens.ref_logprobs, tokens.base)
        for number, name in enumerate(tokens.names):
            at = places(tokens.rl & (tokens.segments == number))
            if len(at):
                streams = Streams(*(x[at] for x in (*columns, tokens.versions)))
                with user_code(f"the loss `{c.import_path}` (trainer.loss)", name):
                    given = fn(streams, **c.kwargs)
                loss = put(loss, at, _aligned(given, at, name, c.import_path))
        return loss, zeros_like(tokens.rl)

    return term


def _aligned(given: Array, at: Array, name: str, path: str) -> Array:
    if not isinstance(given, type(at)):
        raise TrainerError(f"{name}: the loss `{path}` must give {called(at)}, not {type(given).__name__}")
    if given.shape != at.shape:
        shape = f"{given.shape[0]} values" if given.ndim == 1 else f"a tensor of shape {list(given.shape)}"
        raise TrainerError(f"{name}: the loss `{path}` gave {shape} for {len(at)} rl tokens; give one per token")
    return given


def rl_term(c: config.LossConfig) -> RLTerm:
    """The configured rl term, picked once."""
    match c:
        case config.DPPOConfig():
            return dppo(c)
        case config.PPOConfig():
            return ppo(c)
        case config.GSPOConfig():
            return gspo(c)
        case config.CISPOConfig():
            return cispo(c)
        case config.ReinforceConfig():
            return reinforce(c)
        case config.CustomLossConfig():
            return custom(c)


def _clipped(r: Array, advantages: Array, low: float, high: float) -> tuple[Array, Array]:
    plain, bounded = -advantages * r, -advantages * clip(r, 1 - low, 1 + high)
    return maximum(plain, bounded), bounded > plain


def ref_kl_term(ratio: Ratio, tokens: TrainedTokens) -> tuple[Array, Array]:
    """Reverse KL to a teacher as a policy gradient: -sg[log ref - log pi] * r, in the same trust region as dppo.
    The ratio is to the sampler."""
    pull = stop(tokens.ref_logprobs - tokens.logprobs)
    left = where(pull > 0, ratio.difference > REF_KL_TRUST, ratio.difference < -REF_KL_TRUST)
    return -pull * ratio.value * ~left, left


def importance(c: config.ProximalConfig, tokens: TrainedTokens) -> Array:
    """sg[min(rho, cap)] with rho = start / mu: the decoupled objective (arXiv 2110.00641, for language models
    2505.24298) steps from the batch's start, and this weight says who really sampled.

    At sequence level rho is the product over the sequence's rl tokens, or their geometric mean. A frozen sampler has no
    rho; the policy, which stands in for it elsewhere, has left the start behind.
    """
    log = stop(where(isnan(tokens.behaviour), 0.0, tokens.start - tokens.sampler))
    if c.level == "sequence":
        sums, counts = tokens.per_sequence(log)
        log = take(sums / counts if c.geometric else sums, tokens.segments)
    return clip(clip(log, -MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), high=c.cap)


def k1(logprobs: Array, base: Array) -> Array:
    """d = log pi - log ref. Its own derivative, that of log pi, averages to zero whatever the reference says; the
    gradient of its mean is d * grad log pi, so that is the gradient it gets."""
    d = stop(_log_difference(logprobs, base))
    return d * (1 + logprobs - stop(logprobs))


def k2(logprobs: Array, base: Array) -> Array:
    """d^2 / 2: biased as a value, and differentiating it plainly gives the same d * grad log pi (arXiv 2510.01555)."""
    return _log_difference(logprobs, base).square() / 2


def k3(logprobs: Array, base: Array) -> Array:
    """e^-d + d - 1: unbiased and never negative, the penalty of GRPO (arXiv 2402.03300)."""
    d = _log_difference(logprobs, base)
    return (-d).exp() + d - 1


KL_TERMS: dict[str, Callable[[Array, Array], Array]] = {"k1": k1, "k2": k2, "k3": k3}


def _log_difference(logprobs: Array, base: Array) -> Array:
    return clip(logprobs - base, -MAX_LOG_RATIO, MAX_LOG_RATIO)
