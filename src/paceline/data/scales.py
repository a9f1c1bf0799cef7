"""Folds the loss's normalisers into one per-token scale before the forward pass.

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
    """Factors that each token's loss is multiplied by, per component."""

    rl: NDArray
    ce: NDArray
    ref_kl: NDArray
    policy: NDArray
    """For what holds an rl token whatever it is worth, such as a KL penalty: as `rl`, but with weight 1."""


def fold(
    samples: Sequence[Sample],
    normalise: Normalise = "token",
    fixed_length: int = 1,
    totals: NDArray | None = None,
    own: Sequence[int] | None = None,
) -> list[Scales]:
    """The scales of one optimizer step. `totals` are the counts over all ranks, where these are not all samples. Where
    they are, and others train some of them, `own` are the places of those whose scales are wanted.

    `token`: one over the component's tokens. `sample`: each rollout weighs the same, each of its tokens the same within
    it. `fixed`: one over rollouts times a constant length. N counts tokens of non-zero weight: weights scale numerators
    only.
    """
    per_owner, names = _tokens(samples), owners(samples)
    totals = _totals(per_owner) if totals is None else totals
    own = range(len(samples)) if own is None else own
    columns = []
    for name, weights in _weights([samples[i] for i in own]).items():
        part = COMPONENTS.index("rl" if name == "policy" else name)
        tokens, rollouts = totals[part]
        match normalise:
            case "token":
                divisors = [tokens] * len(own)
            case "sample":
                divisors = [rollouts * per_owner[part][names[i]] for i in own]
            case "fixed":
                divisors = [rollouts * fixed_length] * len(own)
        columns.append([(w / np.float64(max(1, d))).astype(np.float32) for w, d in zip(weights, divisors, strict=True)])
    return [Scales(*parts) for parts in zip(*columns, strict=True)]


COMPONENTS = ("rl", "ce", "ref_kl")


def count(samples: Sequence[Sample]) -> NDArray:
    """Tokens and rollouts of each component: what ranks add up to agree on their normalisers."""
    return _totals(_tokens(samples))


def owners(samples: Sequence[Sample]) -> list:
    """Which rollout each sample is of; one without a ticket is a rollout of its own."""
    return [(s.ticket, s.rollout) if s.ticket is not None else i for i, s in enumerate(samples)]


def _tokens(samples: Sequence[Sample]) -> list[Counter]:
    """Per component, the tokens of each rollout."""
    weights = _weights(samples)
    counters = [Counter() for _ in COMPONENTS]
    for counter, name in zip(counters, COMPONENTS, strict=True):
        for owner, weight in zip(owners(samples), weights[name], strict=True):
            counter[owner] += int(np.count_nonzero(weight))
    return counters


def _totals(per_owner: Sequence[Counter]) -> NDArray:
    return np.array([(tokens.total(), sum(n > 0 for n in tokens.values())) for tokens in per_owner])


def _weights(samples: Sequence[Sample]) -> dict[str, list[NDArray]]:
    rl = [s.rl for s in samples]
    ce = [_stream(s, "ce_weights") for s in samples]
    ref_kl = [np.where(s.loss_mask, _stream(s, "ref_kl_weights"), np.float32(0)) for s in samples]
    return {"rl": rl, "ce": ce, "ref_kl": ref_kl, "policy": [(w != 0).astype(np.float32) for w in rl]}


def _stream(sample: Sample, name: str) -> NDArray:
    stream = getattr(sample, name)
    return np.zeros(len(sample), np.float32) if stream is None else stream
