"""Lays out a batch identically on every rank.

Each rank brings some samples and gets those of all: so every rank can count the normalisers, cut the optimizer steps
and deal out micro-batches by itself, with the same result. The traffic is small beside the weights: some 25 bytes a
token. `streams_of` has what a micro-batch of it trains.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample, Scales, collate, pack, token_scales
from paceline.data.packing import Bins, Cost, Cut, cut_steps, flatten_bins
from paceline.planner.shape import read_shape

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


def score_samples(
    scores_of: Callable[[MicroBatch], NDArray], samples: Sequence[Sample], bins: Bins
) -> dict[int, NDArray]:
    """What `scores_of` a micro-batch's sampled tokens gives, for each sample in `bins`, in float32; 0.0 elsewhere. An
    empty bin is a pass too: other ranks may wait for it."""
    scores: dict[int, NDArray] = {}
    own = flatten_bins(bins)
    scales = dict(zip(own, token_scales([samples[i] for i in own]), strict=True))
    for micro_batch in collate_bins(samples, scales, bins, {}):
        stream = np.zeros(len(micro_batch), np.float32)
        stream[micro_batch.loss_mask] = scores_of(micro_batch)
        if micro_batch is not DUMMY_PACK:
            parts = np.split(stream, np.cumsum(micro_batch.lengths)[:-1])
            scores |= zip(micro_batch.members, parts, strict=True)
    return scores


def cost_of(model: "PreTrainedConfig") -> Cost:
    """Forward flops of a token and of a pair of tokens; backward multiplies both about alike. 2 for each weight a token
    meets; 4 for each number of the heads and each pair, of which causality leaves half. Windows are left out."""
    text = model.get_text_config()
    # A family's own names, and transformers' for them.
    shape = read_shape(text.to_dict() | {name: getattr(text, name, None) for name in text.attribute_map})
    return Cost(2.0 * shape.active_parameters, 2.0 * shape.layers * shape.heads * shape.head_dim)


STREAMS = ("versions", "advantages", "teacher_logprobs", "kl_ref_logprobs", "prox_logprobs", "kv_kept")
SCALES = ("rl_scale", "ce_scale", "ref_kl_scale", "unweighted_scale")


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
