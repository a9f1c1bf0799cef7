"""The loss's normalisers, folded into one per-token scale before the forward pass.

The loss is `rl / N_rl + ce / N_ce + ref_kl / N_ref_kl`, each N over one optimizer step on all ranks. Dividing early
makes the gradient a plain sum over tokens: the same however the batch is cut into micro-batches and spread over ranks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.data.sample import Sample

Normalise = Literal["token", "sample", "fixed"]


@dataclass(frozen=True, slots=True)
class Scales:
    """What each token's loss is multiplied by, per component."""

    rl: NDArray
    ce: NDArray
    ref_kl: NDArray


def fold(samples: Sequence[Sample], normalise: Normalise = "token", fixed_length: int = 1) -> list[Scales]:
    """The scales of one optimizer step.

    `token`: one over the component's tokens. `sample`: each rollout weighs the same, each of its tokens the same within
    it. `fixed`: one over rollouts times a constant length. N counts tokens of non-zero weight: weights scale numerators
    only.
    """
    owners = [(s.ticket, s.rollout) if s.ticket is not None else i for i, s in enumerate(samples)]
    columns = []
    for weights in ([s.rl for s in samples], [_weights(s, "ce_weights") for s in samples], _ref_kl(samples)):
        columns.append(_component(weights, owners, normalise, fixed_length))
    return [Scales(*parts) for parts in zip(*columns, strict=True)]


def _component(weights: list[NDArray], owners: list, normalise: Normalise, fixed_length: int) -> list[NDArray]:
    tokens: Counter = Counter()
    for owner, weight in zip(owners, weights, strict=True):
        tokens[owner] += int(np.count_nonzero(weight))
    rollouts = sum(1 for count in tokens.values() if count)
    match normalise:
        case "token":
            total = max(1, tokens.total())
            divisors = [total] * len(weights)
        case "sample":
            divisors = [max(1, rollouts * tokens[owner]) for owner in owners]
        case "fixed":
            divisors = [max(1, rollouts * fixed_length)] * len(weights)
    return [(w / np.float64(d)).astype(np.float32) for w, d in zip(weights, divisors, strict=True)]


def _weights(sample: Sample, name: str) -> NDArray:
    stream = getattr(sample, name)
    return np.zeros(len(sample), np.float32) if stream is None else stream


def _ref_kl(samples: Sequence[Sample]) -> list[NDArray]:
    return [np.where(s.loss_mask, _weights(s, "ref_kl_weights"), np.float32(0)) for s in samples]
