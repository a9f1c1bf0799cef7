"""Lays out a batch identically on every rank.

Each rank brings some samples and gets those of all: so every rank can count the normalisers, cut the optimizer steps
and deal out micro-batches by itself, with the same result. The traffic is small beside the weights: some 25 bytes a
token. `TrainedTokens` are what a micro-batch of it trains, and `Ratio` how far each token's probability has moved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.config.trainer import MAX_LOG_RATIO
from paceline.data import Cost, Cut, MicroBatch, Sample, Scales, collate, cut_steps, pack, token_scales
from paceline.data.balance import Bins, flatten_bins
from paceline.trainer.ops import clip, exp, isnan, ones_like, segment_sums, stop, where
from paceline.weights.update import Array

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DUMMY_SAMPLE = Sample(token_ids=np.zeros(2), loss_mask=np.zeros(2), versions=np.full(2, -1), temperatures=np.ones(2))
"""A dummy sample for a rank without any, so that every rank runs something. Nothing in it trains."""
(DUMMY_PACK,) = pack([DUMMY_SAMPLE], token_scales([DUMMY_SAMPLE]), len(DUMMY_SAMPLE))


def collate_bins(
    samples: Sequence[Sample], scales: Mapping[int, Scales], bins: Bins, prox: Mapping[int, NDArray]
) -> list[MicroBatch]:
    """A rank's micro-batches as all have agreed on them, blank where it has nothing: every rank runs equally many."""
    return [collate(sorted(members), samples, scales, prox) if members else DUMMY_PACK for members in bins]


BUDGET = 4096
"""Tokens of a micro-batch where the run file leaves it open and no trial finds how many fit."""


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """The critic's targets in one sample: each sampled token's value at the batch's start, and its return."""

    sample: Sample
    values: NDArray
    returns: NDArray


@dataclass(frozen=True, slots=True)
class Batch:
    """All samples in an order that is the same on every rank, how they are cut, and what the steps aim at, which is
    filled in for this rank's own samples."""

    samples: list[Sample]
    cuts: list[Cut]
    """For each optimizer step every rank's micro-batches."""
    rank: int
    prox: Mapping[int, NDArray] = field(default_factory=dict)
    """Log probabilities at the batch's start, where a step later than the first needs them, by sample."""
    value_targets: Mapping[int, ValueTargets] = field(default_factory=dict)
    valued: frozenset[int] = frozenset()
    """All samples the critic learns from, on whichever rank."""

    @classmethod
    def single_rank(cls, samples: Sequence[Sample], c: config.TrainerConfig, budget: int) -> Self:
        """A batch that no other rank has a part in."""
        return cls(list(samples), cut_steps(samples, c.minibatches, 1, budget, Cost(1, 0)), 0)

    @property
    def own(self) -> list[int]:
        """The samples of this rank."""
        return sorted(i for cut in self.cuts for i in flatten_bins(cut[self.rank]))


def scales_of(
    samples: Sequence[Sample], members: Sequence[int], own: Sequence[int], c: config.TrainerConfig
) -> dict[int, Scales]:
    """The scales of `own` samples in an optimizer step on all `members`."""
    place = {index: at for at, index in enumerate(members)}
    step = [samples[i] for i in members]
    return dict(zip(own, token_scales(step, c.normalise, c.fixed_length, own=[place[i] for i in own]), strict=True))


def score_samples(forward: Any, samples: Sequence[Sample], bins: Bins) -> dict[int, NDArray]:
    """Log probabilities of the sampled tokens of each sample in `bins` at their temperatures, in float32; 0.0
    elsewhere. An empty bin is a pass too: other ranks may wait for it."""
    scores: dict[int, NDArray] = {}
    own = flatten_bins(bins)
    scales = dict(zip(own, token_scales([samples[i] for i in own]), strict=True))
    for micro_batch in collate_bins(samples, scales, bins, {}):
        stream = np.zeros(len(micro_batch), np.float32)
        stream[micro_batch.loss_mask] = forward.scores(micro_batch)
        if micro_batch is not DUMMY_PACK:
            parts = np.split(stream, np.cumsum(micro_batch.lengths)[:-1])
            scores |= zip(micro_batch.members, parts, strict=True)
    return scores


def cost_of(model: "PreTrainedConfig") -> Cost:
    """Work of a token and of a pair of tokens, from a model's shape."""
    text = model.get_text_config()
    heads = text.num_attention_heads
    return Cost.from_shape(
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
    )


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
    """log mu, recorded by the engine; NaN where another model sampled the token, which makes the ratio 1."""
    prox_logprobs: Array
    """The policy at the batch's start; NaN where it still is the policy in training."""
    advantages: Array
    ref_logprobs: Array
    """A teacher's."""
    base_logprobs: Array
    """The KL reference's; NaN where there is none."""
    rl_scale: Array
    """By what each component's loss of a token is multiplied: its weight over the batch's normaliser. 0 trains not."""
    ce_scale: Array
    ref_kl_scale: Array
    policy_scale: Array
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

    @property
    def sampling_logprobs(self) -> Array:
        """log mu; the policy's own where another model sampled."""
        return self._or_policy(self.rollout_logprobs)

    @property
    def old_logprobs(self) -> Array:
        """The policy at the batch's start. In the first optimizer step that is the policy itself: no second pass."""
        return self._or_policy(self.prox_logprobs)

    @property
    def reference_logprobs(self) -> Array:
        """The KL reference's; the policy's own where there is none."""
        return self._or_policy(self.base_logprobs)

    def per_sequence(self, values: Array) -> tuple[Array, Array]:
        """Sum over each sequence's rl tokens, and how many these are (1 at least)."""
        sums, counts = (
            segment_sums(where(self.rl, x, 0.0), self.segments, len(self.names)) for x in (values, ones_like(values))
        )
        return sums, clip(counts, low=1.0)

    def _or_policy(self, stream: Array) -> Array:
        return where(isnan(stream), stop(self.logprobs), stream)


STREAMS = ("versions", "advantages", "ref_logprobs", "base_logprobs", "prox_logprobs", "kv_kept")
SCALES = ("rl_scale", "ce_scale", "ref_kl_scale", "policy_scale")


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
