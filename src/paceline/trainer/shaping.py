"""A KL reference that pulls through the advantages; and one that must be who it was."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import Sample
from paceline.trainer.base import TrainerError


def shaped(samples: Sequence[Sample], policy: Sequence[NDArray], c: config.KL) -> list[Sample]:
    """K1 shaping: from each sample's advantages, coef times the mean over its sampled tokens of log pi - log ref,
    clipped to +-kl_max. The policy here is what it was when the batch began, so nothing flows back through it."""
    out = []
    for sample, pi in zip(samples, policy, strict=True):
        mask, base = sample.loss_mask, sample.base_logprobs
        if sample.advantages is None or base is None or not mask.any():
            out.append(sample)
            continue
        k1 = float(np.mean(pi[mask].astype(np.float64) - base[mask]))
        penalty = np.float32(c.coef * np.clip(k1, -c.kl_max, c.kl_max))
        out.append(sample.with_streams(advantages=sample.advantages - penalty * mask))
    return out


def check_base(saved: str, now: str) -> None:
    """Refuse a base that is not the one a checkpoint was held near; one written without a reference names none."""
    if saved and saved != now:
        raise TrainerError(
            "the KL reference is the model this run started from, but model.name now holds other weights: "
            "put the first ones back, or choose another trainer.kl.reference"
        )
