"""Log probabilities without a gradient: of the batch's start, and of a KL reference."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.data import MicroBatch, Sample, fold
from paceline.data.balance import Bins
from paceline.data.cutting import held
from paceline.trainer.blank import BLANK_PACK, packed


class Scoring(Protocol):
    """A model's forward pass."""

    def scores(self, micro_batch: MicroBatch) -> NDArray:
        """What the model gives the sampled tokens at their temperatures, in float32."""
        ...


def score(forward: Scoring, samples: Sequence[Sample], bins: Bins) -> dict[int, NDArray]:
    """What a model gives the sampled tokens of each sample in `bins` at their temperatures; 0.0 elsewhere. An empty one
    is a pass too: other ranks may wait for it."""
    scores: dict[int, NDArray] = {}
    own = held(bins)
    scales = dict(zip(own, fold([samples[i] for i in own]), strict=True))
    for micro_batch in packed(samples, scales, bins, {}):
        stream = np.zeros(len(micro_batch), np.float32)
        stream[micro_batch.loss_mask] = forward.scores(micro_batch)
        if micro_batch is not BLANK_PACK:
            parts = np.split(stream, np.cumsum(micro_batch.lengths)[:-1])
            scores |= zip(micro_batch.members, parts, strict=True)
    return scores
