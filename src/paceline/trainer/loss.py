"""The loss: one sum over terms, each token already scaled by its normaliser.

    sum_t  rl_scale_t * rl_t  +  ce_scale_t * ce_t  +  teacher_kl_scale_t * teacher_kl_t
         + regulariser_scale_t * (kl_coef * kl_t - entropy_coef * H_t)

    rl      the policy loss (`trainer.loss`)        teacher_kl  reverse KL to a teacher: on-policy distillation
    ce      cross entropy on given tokens           kl      KL penalty towards a reference (`trainer.kl`)

`regulariser_scale` is the rl normaliser on rl tokens, without the weights that an algorithm gave them. The second line
is off by default. Which token carries which scale is the algorithm's choice, made long before; nothing here knows its
name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data.sample import CLIPPED, SKIPPED
from paceline.trainer.terms import (
    KL_TERMS,
    Ratio,
    TrainedTokens,
    importance,
    isnan,
    k3,
    no_grad,
    ones_like,
    rl_term,
    stack,
    stop,
    teacher_kl_term,
    total,
    where,
    zeros_like,
)
from paceline.weights.update import Array

SKIP_RANGE = (0.8, 1.2)


class Loss:
    """Adds the components up and keeps the sums that the step's metrics are made of."""

    def __init__(self, c: config.TrainerConfig) -> None:
        self._config = c
        self._rl = rl_term(c.loss)
        self._kl = KL_TERMS[c.kl.kind] if c.kl is not None and c.kl.how == "loss" else None

    def __call__(self, tokens: TrainedTokens, version: int, first: bool = True) -> tuple[Array, "LossStats"]:
        """The scaled loss of these tokens, and unscaled sums for the report. `first`: no optimizer step was taken yet
        since `version`, so the trainer's weights are those that the engine serves."""
        parts, sums = self.parts(tokens, version, first)
        return stack(list(parts.values())).sum(), sums

    def parts(self, tokens: TrainedTokens, version: int, first: bool = True) -> tuple[dict[str, Array], "LossStats"]:
        """The same, term by term."""
        losses = self.per_token(tokens)
        parts = {name: values.sum() for name, values in losses.scaled().items()}
        assert all(f"loss_{name}" in STAT_NAMES for name in parts), "a term that no sum reports"
        with no_grad(tokens.logprobs):
            sums = LossStats.from_tokens(tokens, losses, parts, version, first)
        return parts, sums

    def per_token(self, tokens: TrainedTokens) -> "TokenLosses":
        """The losses of each token alone, before anything is added up."""
        ratio = sampler_ratio = Ratio.from_logprobs(
            tokens.logprobs, tokens.or_policy_where_nan(tokens.rollout_logprobs)
        )
        if self._config.proximal:
            ratio = Ratio.from_logprobs(tokens.logprobs, tokens.or_policy_where_nan(tokens.prox_logprobs))
        rl, rl_clipped = self._rl(ratio, tokens)
        if self._config.proximal:
            rl = rl * importance(self._config.proximal, tokens)
        teacher_kl, teacher_clipped = teacher_kl_term(sampler_ratio, tokens)
        terms = {"rl": rl, "ce": -tokens.logprobs, "teacher_kl": teacher_kl}
        scales = {"rl": tokens.rl_scale, "ce": tokens.ce_scale, "teacher_kl": tokens.teacher_kl_scale}
        if self._kl is not None and self._config.kl is not None:
            terms["kl"] = self._config.kl.coef * self._kl(
                tokens.logprobs, tokens.or_policy_where_nan(tokens.kl_ref_logprobs)
            )
        if self._config.entropy_coef:
            terms["entropy"] = -self._config.entropy_coef * tokens.entropy
        skipped = self._skip_mask(sampler_ratio, tokens)
        unskipped = ~skipped[tokens.segments]
        scales |= {name: tokens.regulariser_scale for name in terms if name not in scales}
        return TokenLosses(terms, scales, {"rl": rl_clipped, "teacher_kl": teacher_clipped}, ratio, skipped, unskipped)

    def _skip_mask(self, ratio: Ratio, tokens: TrainedTokens) -> Array:
        """Sequences so many of whose tokens are far from the sampler that nothing in them can be trusted. Decided per
        sequence, so that it does not depend on how a batch is split, and skipped tokens still count in the normaliser;
        or for all sequences of the micro-batch together."""
        threshold, (low, high) = self._config.clip_skip_threshold, SKIP_RANGE
        with no_grad(tokens.logprobs):
            far = (ratio.value < low) | (ratio.value > high)
            outside, counts = tokens.per_sequence(where(far, ones_like(ratio.value), 0.0))
            if self._config.clip_skip_scope == "micro_batch":
                outside, counts = zeros_like(outside) + outside.sum(), counts.sum()
            return outside / counts > (inf if threshold is None else threshold)


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """A loss token by token."""

    terms: dict[str, Array]
    """Unscaled, by term."""
    scales: dict[str, Array]
    clipped: dict[str, Array]
    """Where a bound held a token back, by term."""
    ratio: Ratio
    """Of the policy to the one that the rl term measures from: the sampler, or under `proximal` the batch's start."""
    skipped: Array
    """Sequences that are left out as a whole."""
    unskipped: Array
    """Tokens of the other sequences."""

    def scaled(self) -> dict[str, Array]:
        """Each token's share of the loss. Where a scale is zero the term may be infinite, and 0 * inf is NaN."""
        used = {name: (scale != 0) & self.unskipped for name, scale in self.scales.items()}
        return {name: where(used[name], term, 0.0) * self.scales[name] for name, term in self.terms.items()}


TERMS = {"rl": ("rl", "kl", "entropy"), "ce": ("ce",), "teacher_kl": ("teacher_kl",)}
"""Terms of the loss that a component's normaliser divides: KL and entropy go by the rl tokens."""
STAT_NAMES = (
    *(f"loss_{part}" for part in ("rl", "ce", "teacher_kl", "kl", "entropy")),
    *("num_rl", "num_ce", "num_teacher_kl", "num_with_prox", "num_with_kl_ref"),
    *("num_fresh", "num_kv_kept", "num_stale", "num_skipped"),
    *("ratio", "ppo_kl", "sampler_kl", "clipped", "entropy"),  # over the rl tokens
    *("mismatch", "kv_kept", "drift"),  # over fresh, kv_kept and stale tokens: r - log r - 1, r = prox / rollout
    *("nll", "teacher_kl", "teacher_kl_clipped", "kl"),  # over ce, teacher_kl, teacher_kl and with_kl_ref tokens
)
"""First the scaled terms. Then counts: of tokens by component; of rl tokens whose log probability at the batch's start
is known (with_prox), with a KL reference's, of the current version with its own KV cache (fresh) or an older version's
(kv_kept), and of older versions (stale); and of skipped sequences. Then sums over these tokens."""


@dataclass(frozen=True, slots=True)
class LossStats:
    """Sums over tokens, added over micro-batches and ranks, and divided once."""

    values: dict[str, Array]
    tokens: Array | None = None
    """Of each token its log probability, its entropy and its flags (`data.sample`), a row each."""

    @classmethod
    def from_tokens(
        cls, tokens: TrainedTokens, losses: TokenLosses, parts: Mapping[str, Array], version: int, first: bool
    ) -> "LossStats":
        rl, ce, distilled = (scale != 0 for scale in (tokens.rl_scale, tokens.ce_scale, tokens.teacher_kl_scale))
        prox, rollout = (tokens.or_policy_where_nan(x) for x in (tokens.prox_logprobs, tokens.rollout_logprobs))
        divergence = Ratio.from_logprobs(prox, rollout).divergence()
        with_prox = rl & (~isnan(tokens.prox_logprobs) | first)
        current = with_prox & (tokens.versions == version)
        kv_kept = zeros_like(rl) if tokens.kv_kept is None else current & tokens.kv_kept
        fresh = current & ~kv_kept
        stale = with_prox & (tokens.versions < version) & (tokens.versions >= 0) & ~isnan(tokens.rollout_logprobs)
        with_kl_ref = rl & ~isnan(tokens.kl_ref_logprobs)
        means = {
            "ratio": (rl, losses.ratio.value),
            "ppo_kl": (rl, Ratio.from_logprobs(tokens.logprobs, prox).divergence()),
            "sampler_kl": (rl, Ratio.from_logprobs(tokens.logprobs, rollout).divergence()),
            "clipped": (rl, losses.clipped["rl"]),
            "entropy": (rl, tokens.entropy),
            "mismatch": (fresh, divergence),
            "kv_kept": (kv_kept, divergence),
            "drift": (stale, divergence),
            "nll": (ce, -tokens.logprobs),
            "teacher_kl": (distilled, tokens.logprobs - tokens.teacher_logprobs),
            "teacher_kl_clipped": (distilled, losses.clipped["teacher_kl"]),
            "kl": (with_kl_ref, k3(tokens.logprobs, tokens.or_policy_where_nan(tokens.kl_ref_logprobs))),
        }
        masks = {"rl": rl, "with_prox": with_prox, "ce": ce, "teacher_kl": distilled, "with_kl_ref": with_kl_ref}
        masks |= {"fresh": fresh, "kv_kept": kv_kept, "stale": stale, "skipped": losses.skipped}
        values = {f"loss_{name}": total(part) for name, part in parts.items()}
        values |= {f"num_{name}": total(mask) for name, mask in masks.items()}
        values |= {n: total(where(mask, x, 0.0)) for n, (mask, x) in means.items()}
        held = (rl & (losses.clipped["rl"] != 0)) | (distilled & (losses.clipped["teacher_kl"] != 0))
        flags = where(held, CLIPPED * ones_like(tokens.entropy), 0.0) + where(losses.unskipped, 0.0, 1.0 * SKIPPED)
        return cls(values, stack([stop(tokens.logprobs), stop(tokens.entropy), flags]))

    @staticmethod
    def total(sums: Sequence["LossStats"]) -> Array:
        """All of them in one vector, in the order of `STAT_NAMES`."""
        zero = zeros_like(next(iter(sums[0].values.values())))
        return stack([stack([s.values.get(name, zero) for name in STAT_NAMES]) for s in sums]).sum(0)


def _drift(s: Mapping[str, float]) -> float:
    """How far the weights have moved since older tokens were sampled: the mean of r - log r - 1 over rl tokens of older
    versions, r = the batch's start / the sampler, less the same mean over the step's fresh tokens. Fresh tokens differ
    by numerics alone; older ones differ by that too, so it is subtracted. Without fresh tokens nothing is."""
    numerics = s["mismatch"] / s["num_fresh"] if s["num_fresh"] else 0.0
    return max(0.0, s["drift"] / s["num_stale"] - numerics) if s["num_stale"] else 0.0


MEANS = {
    "rl": {
        "ratio": "ratio",
        "ppo_kl": "ppo_kl",
        "sampler_kl": "sampler_kl",
        "clip_fraction": "clipped",
        "entropy": "entropy",
    },
    "fresh": {"mismatch_kl": "mismatch", "mismatch/numerics": "mismatch"},
    "kv_kept": {"mismatch/kv_kept": "kv_kept"},
    "with_kl_ref": {"kl": "kl"},
    "ce": {"nll": "nll"},
    "teacher_kl": {"teacher_kl": "teacher_kl", "teacher_kl/clip_fraction": "teacher_kl_clipped"},
}
"""By the count that they are divided by: public names of means, and the sums they are made of."""


def metrics(totals: NDArray, steps: int) -> dict[str, float]:
    """Means under their public names over the optimizer steps of a batch; components without tokens are left out."""
    s = dict(zip(STAT_NAMES, totals.tolist(), strict=True))
    loss = {part: s[f"loss_{part}"] / steps for part in ("rl", "ce", "teacher_kl", "kl", "entropy")}
    out = {"loss": sum(loss.values())}
    out |= {f"loss/{part}": loss[part] for part in ("rl", "ce", "teacher_kl") if s[f"num_{part}"]}
    for tokens, means in MEANS.items():
        if count := s[f"num_{tokens}"]:
            out |= {public: s[name] / count for public, name in means.items()}
    if s["num_with_prox"] < s["num_rl"]:  # a later step without a snapshot does not know where the batch began
        del out["ppo_kl"]
    if s["num_rl"]:
        out |= {f"loss/{part}": loss[part] for part in ("kl", "entropy") if loss[part]}
        out |= {"skipped_samples": s["num_skipped"], "mismatch/staleness": _drift(s)}
    return out
