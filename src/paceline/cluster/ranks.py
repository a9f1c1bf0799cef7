"""What part of a batch is handed to which rank. They lay the parts together and agree on who trains what."""

from collections.abc import Hashable, Sequence

import numpy as np

from paceline.config.trainer import Trainer
from paceline.data import Sample
from paceline.data.balance import Cost
from paceline.data.scales import owners
from paceline.trainer.batch import cost_of

__all__ = ["cost_of", "spread"]


def spread(batch: Sequence[Sample], ranks: int, _config: Trainer, cost: Cost) -> list[list[Sample]]:
    """One share of the batch for each rank: neighbours, the first rank's first, so that the shares end to end are the
    batch again. Of like cost, and a rollout's samples stay together, for a rank that trains its share as it comes."""
    rollouts: dict[Hashable, list[Sample]] = {}
    for owner, sample in zip(owners(batch), batch, strict=True):
        rollouts.setdefault(owner, []).append(sample)
    costs = np.array([cost([len(sample) for sample in samples]) for samples in rollouts.values()])
    shares: list[list[Sample]] = [[] for _ in range(ranks)]
    middles = np.cumsum(costs) - costs / 2
    for samples, middle in zip(rollouts.values(), middles, strict=True):
        shares[int(ranks * middle / costs.sum())] += samples
    return shares
