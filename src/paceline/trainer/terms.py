"""Per-token loss terms: pure functions of a token's ratio and its advantage.

`pi` is the policy in training, `mu` the policy that sampled, both at the sampling temperature. A term sees the ratio
r = pi / old, where old is mu, or under `proximal` the policy at the batch's start. sg[...] stops the gradient. Each
term answers with the loss per token and with where a bound held the token back. Which tokens it is used on, and by what
they are divided, is decided elsewhere.

The loss is written once for arrays of torch, mlx and numpy. `a * b`, `a > b`, `~a`, `a.sum()` and `a[index]` mean the
same in all three; all else is one of the operations below, which follow torch, gradients included: where mlx differs,
its side makes up for it. numpy has no gradients: it is for tools that show a loss and train nothing.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.config.trainer import MAX_LOG_RATIO, TEACHER_KL_TRUST
from paceline.data import MicroBatch
from paceline.data.sample import RENAMED_STREAMS
from paceline.errors import TrainerError
from paceline.util.importing import import_object
from paceline.util.lazy_import import renamed_attributes
from paceline.util.user_code import user_code
from paceline.weights.update import Array

OPERATIONS = {
    "torch": "paceline.trainer.torch.ops",
    "mlx": "paceline.trainer.mlx.ops",
    "numpy": "paceline.trainer.numpy_ops",
}
"""The module with a library's operations, by the package that an array's type comes from."""


@cache
def ops_of(kind: type) -> ModuleType:
    """The operations for arrays of a type."""
    root = next(root for base in kind.__mro__ if (root := base.__module__.partition(".")[0]) in OPERATIONS)
    return importlib.import_module(OPERATIONS[root])


def _op(name: str) -> Callable[..., Any]:
    """An operation by the type of its first argument: the library's own function, unless its module has another."""

    def run(x: Array | list[Array], *rest: Any) -> Any:
        ops = ops_of(type(x[0] if isinstance(x, list) else x))
        return getattr(ops if hasattr(ops, name) else ops.LIBRARY, name)(x, *rest)

    return run


where, minimum, maximum, isnan, exp, square = map(_op, ("where", "minimum", "maximum", "isnan", "exp", "square"))
zeros_like, ones_like = _op("zeros_like"), _op("ones_like")
stack = _op("stack")
"""stack([...]): of a list of arrays."""
stop = _op("stop")
"""sg[x]: the same numbers, through which no gradient flows."""
clip = _op("clip")
"""clip(x, low, high), each a number or None: the gradient passes inside the bounds and on them."""
total = _op("total")
"""The sum in the widest type the library can add up in where the array lies."""
put = _op("put")
"""put(x, index, values): a copy with other elements at these places."""
flatnonzero = _op("flatnonzero")
"""Where a mask is true."""
segment_sums = _op("segment_sums")
"""segment_sums(values, segments, count): the sum of each of `count` segments."""
to_host = _op("to_host")
"""The array as one of numpy's, computed by now."""
no_grad = _op("no_grad")
"""A context in which nothing is computed for a gradient."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How far tokens have moved from an older policy's probabilities."""

    log: Array
    value: Array
    difference: Array
    """new - old in probability, without gradient."""

    @classmethod
    def from_logprobs(cls, new: Array, old: Array) -> "Ratio":
        log = clip(new - old, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        return cls(log, exp(log), exp(stop(new)) - exp(old))

    def divergence(self) -> Array:
        """r - log r - 1: never negative, and zero only where nothing moved."""
        return self.value - self.log - 1


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Parallel one-dimensional arrays over the trained tokens of several sequences laid end to end."""

    logprobs: Array
    """log pi, the policy in training. It and `entropy` alone may have a gradient."""
    rollout_logprobs: Array
    """log mu, recorded by the engine (`Sample.logprobs`); NaN where a frozen model sampled: the ratio is 1 there."""
    prox_logprobs: Array
    """The policy at the batch's start; NaN where no pass computed them: in the first optimizer step it is the policy in
    training."""
    advantages: Array
    teacher_logprobs: Array
    """The teacher's, of `teacher_kl`."""
    kl_ref_logprobs: Array
    """The KL reference's; NaN where there is none."""
    rl_scale: Array
    """By what each component's loss of a token is multiplied: its weight over the batch's normaliser. A token with 0 is
    not in the loss."""
    ce_scale: Array
    teacher_kl_scale: Array
    regulariser_scale: Array
    """The same for what belongs to no component, KL and entropy: of the rl tokens, without their weights."""
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

    def per_sequence(self, values: Array) -> tuple[Array, Array]:
        """Sum over each sequence's rl tokens, and how many these are (1 at least)."""
        sums, counts = (
            segment_sums(where(self.rl, x, 0.0), self.segments, len(self.names)) for x in (values, ones_like(values))
        )
        return sums, clip(counts, 1.0, None)

    def or_policy_where_nan(self, logprobs: Array) -> Array:
        """Log probabilities with the policy's own, without gradient, in place of NaN."""
        return where(isnan(logprobs), stop(self.logprobs), logprobs)


STREAMS = ("versions", "advantages", "teacher_logprobs", "kl_ref_logprobs", "prox_logprobs", "kv_kept")
SCALES = ("rl_scale", "ce_scale", "teacher_kl_scale", "regulariser_scale")


def trained_positions(micro_batch: MicroBatch) -> NDArray:
    """Places of the tokens that any component trains."""
    return np.logical_or.reduce([getattr(micro_batch, name) != 0 for name in SCALES]).nonzero()[0]


def streams_of(micro_batch: MicroBatch) -> dict[str, NDArray]:
    """The streams of `TrainedTokens`, but for those that the policy computes."""
    positions = trained_positions(micro_batch)
    owners = np.repeat(np.arange(len(micro_batch.lengths)), micro_batch.lengths)
    streams = {name: getattr(micro_batch, name) for name in (*STREAMS, *SCALES)}
    streams |= {"rollout_logprobs": micro_batch.logprobs, "segments": owners}
    return {name: stream[positions] for name, stream in streams.items()}


Term = tuple[Array, Array]
"""A loss per token, and where a bound held the token back."""
RLTerm = Callable[[Ratio, TrainedTokens], Term]


def dppo(c: config.DPPOConfig, ratio: Ratio, tokens: TrainedTokens) -> Term:
    """Policy gradient with a trust region on the difference of probabilities d: -keep * A * r + tau * (log r)^2
    (divergence PPO, Qi et al., arXiv 2602.04879, with its total-variation mask).

    A token is dropped once its probability has already moved far enough the way its advantage pushes. Rare tokens have
    huge ratios and tiny differences; masking by d keeps them, where ratio clipping would throw away exactly the
    exploratory ones. The square holds all rl tokens near the sampler, dropped ones too.
    """
    a, d = tokens.advantages, ratio.difference
    dropped = ((a > 0) & (d > c.high)) | ((a < 0) & (d < -c.low))
    return -a * ratio.value * ~dropped + c.kl_tau * square(ratio.log), dropped


def ppo(c: config.PPOConfig, ratio: Ratio, tokens: TrainedTokens) -> Term:
    """The clipped surrogate -min(r A, clip(r) A) (arXiv 1707.06347); its two bounds may differ, as in DAPO (arXiv
    2503.14476). The dual clip (arXiv 1912.09729) also bounds what one token of negative advantage can cost."""
    a = tokens.advantages
    loss, clipped = _clipped_loss(ratio.value, a, c.clip_low, c.clip_high)
    if c.dual_clip is not None:
        ceiling = where(a < 0, -a * c.dual_clip, inf)
        loss, clipped = minimum(loss, ceiling), clipped | (loss > ceiling)
    return loss, clipped


def gspo(c: config.GSPOConfig, ratio: Ratio, tokens: TrainedTokens) -> Term:
    """PPO's clip on the sequence's ratio s = exp(mean of log r over its rl tokens) (arXiv 2507.18071).

    The reward judges the whole sequence, so the whole sequence is inside the trust region or outside. Written per token
    as sg[s] * pi / sg[pi]: the same value everywhere in the sequence, and the gradient reaches each token.
    """
    sums, counts = tokens.per_sequence(stop(ratio.log))
    s = exp((sums / counts)[tokens.segments])
    here = exp(tokens.logprobs - stop(tokens.logprobs))
    return _clipped_loss(s * here, tokens.advantages, c.clip_low, c.clip_high)


def cispo(c: config.CISPOConfig, ratio: Ratio, tokens: TrainedTokens) -> Term:
    """-sg[clip(r)] * A * log pi (arXiv 2506.13585): the weight is clipped and not the update, so the rare tokens that
    turn a line of thought, whose ratios leave every range first, still learn."""
    r = stop(ratio.value)
    bounded = clip(r, c.min_ratio, c.max_ratio)
    return -bounded * tokens.advantages * tokens.logprobs, bounded != r


def reinforce(c: config.ReinforceConfig, ratio: Ratio, tokens: TrainedTokens) -> Term:
    """-A log pi (Williams 1992): right when the policy itself has just sampled.

    For older samples `max_ratio` weighs tokens by sg[min(r, max_ratio)], a truncated importance weight: unbiased up to
    the cap, which bounds the variance.
    """
    r = stop(ratio.value)
    weight = ones_like(r) if c.max_ratio is None else clip(r, None, c.max_ratio)
    return -weight * tokens.advantages * tokens.logprobs, (weight != r) & (c.max_ratio is not None)


@dataclass(frozen=True, slots=True)
class Streams:
    """Input of a custom loss: one sequence's rl tokens, in order, as arrays of one length in the trainer's library."""

    logprobs: Array
    """log pi: the only one with a gradient."""
    rollout_logprobs: Array
    """The sampler's; the policy's own where the sampler was frozen."""
    log_ratio: Array
    """log pi - log old, clamped, with its gradient. old is the sampler, or under `proximal` the policy at the batch's
    start."""
    advantages: Array
    teacher_logprobs: Array
    kl_ref_logprobs: Array
    """The KL reference's; the policy's own where there is none."""
    versions: Array

    if not TYPE_CHECKING:
        __getattr__ = renamed_attributes({"behaviour_logprobs": "rollout_logprobs"} | RENAMED_STREAMS)


def custom(fn: Callable[..., Array], c: config.CustomLossConfig, ratio: Ratio, tokens: TrainedTokens) -> Term:
    """The user's `fn(streams, **kwargs)`, called once per sequence; it gives one loss per rl token."""
    loss = zeros_like(tokens.logprobs)
    columns = (
        tokens.logprobs,
        tokens.or_policy_where_nan(tokens.rollout_logprobs),
        ratio.log,
        tokens.advantages,
        tokens.teacher_logprobs,
        tokens.or_policy_where_nan(tokens.kl_ref_logprobs),
    )
    for number, name in enumerate(tokens.names):
        at = flatnonzero(tokens.rl & (tokens.segments == number))
        if len(at):
            streams = Streams(*(x[at] for x in (*columns, tokens.versions)))
            with user_code(f"the loss `{c.import_path}` (trainer.loss)", name):
                given = fn(streams, **c.kwargs)
            loss = put(loss, at, _check_aligned(given, at, name, c.import_path))
    return loss, zeros_like(tokens.rl)


def _check_aligned(given: Array, at: Array, name: str, path: str) -> Array:
    if not isinstance(given, type(at)):
        raise TrainerError(f"{name}: the loss `{path}` must give {ops_of(type(at)).CALLED}, not {type(given).__name__}")
    if given.shape != at.shape:
        shape = f"{given.shape[0]} values" if given.ndim == 1 else f"a tensor of shape {list(given.shape)}"
        raise TrainerError(f"{name}: the loss `{path}` gave {shape} for {len(at)} rl tokens; give one per token")
    return given


RL_TERMS: dict[str, Callable[..., Term]] = {term.__name__: term for term in (dppo, ppo, gspo, cispo, reinforce)}


def rl_term(c: config.LossConfig) -> RLTerm:
    """The configured rl term, picked once."""
    if isinstance(c, config.CustomLossConfig):
        return partial(custom, import_object(c.import_path), c)
    return partial(RL_TERMS[c.type], c)


def _clipped_loss(r: Array, advantages: Array, low: float, high: float) -> Term:
    plain, bounded = -advantages * r, -advantages * clip(r, 1 - low, 1 + high)
    return maximum(plain, bounded), bounded > plain


def teacher_kl_term(ratio: Ratio, tokens: TrainedTokens) -> Term:
    """Reverse KL to a teacher as a policy gradient: -sg[log teacher - log pi] * pi / mu, in dppo's trust region."""
    advantage = stop(tokens.teacher_logprobs - tokens.logprobs)
    dropped = where(advantage > 0, ratio.difference > TEACHER_KL_TRUST, ratio.difference < -TEACHER_KL_TRUST)
    return -advantage * ratio.value * ~dropped, dropped


def importance(c: config.ProximalConfig, tokens: TrainedTokens) -> Array:
    """sg[min(rho, cap)] with rho = prox / mu: the decoupled objective (arXiv 2110.00641, for language models
    2505.24298) clips around the policy at the batch's start, and this weight corrects for the policy that sampled.

    At sequence level rho is the product over the sequence's rl tokens, or their geometric mean. It is 1 where a frozen
    model sampled, whose log probabilities are unknown.
    """
    mu = tokens.rollout_logprobs
    log = stop(where(isnan(mu), 0.0, tokens.or_policy_where_nan(tokens.prox_logprobs) - mu))
    if c.level == "sequence":
        sums, counts = tokens.per_sequence(log)
        log = (sums / counts if c.geometric else sums)[tokens.segments]
    return clip(exp(clip(log, -MAX_LOG_RATIO, MAX_LOG_RATIO)), None, c.cap)


def k1(logprobs: Array, ref: Array) -> Array:
    """d = log pi - log ref. Its own derivative, that of log pi, averages to zero whatever the reference says; the
    gradient of its mean is d * grad log pi, so that is the gradient it gets."""
    d = stop(_log_difference(logprobs, ref))
    return d * (1 + logprobs - stop(logprobs))


def k2(logprobs: Array, ref: Array) -> Array:
    """d^2 / 2: biased as a value, and differentiating it plainly gives the same d * grad log pi (arXiv 2510.01555)."""
    return square(_log_difference(logprobs, ref)) / 2


def k3(logprobs: Array, ref: Array) -> Array:
    """e^-d + d - 1: unbiased and never negative, the penalty of GRPO (arXiv 2402.03300)."""
    d = _log_difference(logprobs, ref)
    return exp(-d) + d - 1


KL_TERMS: dict[str, Callable[[Array, Array], Array]] = {"k1": k1, "k2": k2, "k3": k3}


def _log_difference(logprobs: Array, ref: Array) -> Array:
    return clip(logprobs - ref, -MAX_LOG_RATIO, MAX_LOG_RATIO)


# -- reasons: the comparisons above with one token's numbers ----------------------------------------------------------


def find_clipped(
    c: config.LossConfig,
    ratio: NDArray,
    difference: NDArray,
    advantages: NDArray,
    rl: NDArray,
    clipped: Mapping[str, NDArray],
) -> list[tuple[int, str, str]]:
    """The tokens of one sequence that a bound held back, as `clipped` has them by component: their indices,
    components and rules. `rl` says which tokens the rl component trains."""

    def rule(component: str, at: int) -> str:
        d = float(difference[at])
        if component == "rl":
            sequence = float(np.exp(np.log(ratio[rl].astype(np.float64)).mean()))
            return rl_clip_reason(c, float(ratio[at]), sequence, d, advantages[at] > 0)
        return (
            f"dropped: its probability already {_direction(d)} by more than {TEACHER_KL_TRUST:g} since it was sampled, "
            "the way the teacher pulls"
        )

    return [(int(at), name, rule(name, at)) for name, mask in clipped.items() for at in np.flatnonzero(mask)]


def rl_clip_reason(c: config.LossConfig, r: float, s: float, d: float, up: bool) -> str:
    match c:
        case config.DPPOConfig():
            name = "high" if up else "low"
            moved = f"{_direction(d)} by {abs(d):.3g}"
            return f"dropped: its probability already {moved}, more than {name} = {getattr(c, name):g}"
        case config.PPOConfig():
            return _clip_rule("the ratio", r, up, c.clip_low, c.clip_high, c.dual_clip)
        case config.GSPOConfig():
            return _clip_rule("the sequence's ratio", s, up, c.clip_low, c.clip_high)
        case config.CISPOConfig() | config.ReinforceConfig():
            name = "min_ratio" if isinstance(c, config.CISPOConfig) and r <= c.max_ratio else "max_ratio"
            return f"the ratio {r:.4g} is weighed as {name} = {getattr(c, name):g}; its gradient stays"
    return "held back by the run's own loss"


def _direction(difference: float) -> str:
    return "rose" if difference > 0 else "fell"


def _clip_rule(what: str, ratio: float, up: bool, low: float, high: float, dual: float | None = None) -> str:
    if up:
        return f"clipped: {what} {ratio:.4g} is above 1 + clip_high = {1 + high:g}"
    if ratio < 1 - low:
        return f"clipped: {what} {ratio:.4g} is below 1 - clip_low = {1 - low:g}"
    return f"clipped: {what} {ratio:.4g} is above dual_clip = {dual:g}"
