"""How old a sample is, and what happens to one that is too old."""

from typing import Literal

import numpy as np

from paceline.data import Sample

OnStale = Literal["drop", "mask", "keep"]


def staleness(sample: Sample, version: int) -> int:
    """Versions between the oldest token that trains and now; 0 for a frozen sampler, whose tokens never go stale."""
    oldest = sample.oldest_version
    return 0 if oldest is None else version - oldest


def fresh_enough(sample: Sample, version: int, limit: int, on_stale: OnStale) -> Sample | None:
    """The sample as it may train now; None drops it."""
    if on_stale == "keep" or staleness(sample, version) <= limit:
        return sample
    if on_stale == "drop":
        return None
    keep = sample.versions >= version - limit
    if not (keep & sample.loss_mask).any():
        return None
    changed = {"rl_weights": np.where(keep, sample.rl, np.float32(0))}
    if sample.ref_kl_weights is not None:
        changed["ref_kl_weights"] = np.where(keep, sample.ref_kl_weights, np.float32(0))
    return sample.with_streams(**changed)
