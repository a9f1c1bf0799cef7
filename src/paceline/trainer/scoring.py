"""Log probabilities without a gradient: of the batch's start, and of a KL reference."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data import Sample, fold, pack
from paceline.trainer.forward import Forward


@torch.no_grad()
def score(forward: Forward, samples: Sequence[Sample], budget: int) -> list[NDArray]:
    """What a model gives each sample's sampled tokens at their temperatures; 0.0 elsewhere."""
    scores = [np.zeros(len(sample), np.float32) for sample in samples]
    for micro_batch in pack(samples, fold(samples), budget):
        places = forward.send(micro_batch.loss_mask.nonzero()[0])
        values, _, _ = forward.logprobs(micro_batch, places)
        stream = np.zeros(len(micro_batch), np.float32)
        stream[micro_batch.loss_mask] = values.float().cpu().numpy()
        for member, part in zip(
            micro_batch.members, np.split(stream, np.cumsum(micro_batch.lengths)[:-1]), strict=True
        ):
            scores[member] = part
    return scores
