"""Log probabilities without a gradient: of the batch's start, and of a KL reference."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data import Sample, fold
from paceline.data.balance import Bins
from paceline.data.cutting import held
from paceline.trainer.blank import BLANK_PACK, packed
from paceline.trainer.forward import Forward


@torch.no_grad()
def score(forward: Forward, samples: Sequence[Sample], bins: Bins) -> dict[int, NDArray]:
    """What a model gives the sampled tokens of each sample in `bins` at their temperatures; 0.0 elsewhere. An empty one
    is a pass too: other ranks may wait for it."""
    scores: dict[int, NDArray] = {}
    own = held(bins)
    scales = dict(zip(own, fold([samples[i] for i in own]), strict=True))
    for micro_batch in packed(samples, scales, bins, {}):
        places = forward.send(micro_batch.loss_mask.nonzero()[0])
        values, _, _ = forward.logprobs(micro_batch, places)
        stream = np.zeros(len(micro_batch), np.float32)
        stream[micro_batch.loss_mask] = values.float().cpu().numpy()
        if micro_batch is not BLANK_PACK:
            parts = np.split(stream, np.cumsum(micro_batch.lengths)[:-1])
            scores |= zip(micro_batch.members, parts, strict=True)
    return scores
