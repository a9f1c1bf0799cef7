"""Log probabilities without a gradient: of the batch's start, and of a KL reference."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data import Sample, fold, pack
from paceline.trainer.blank import BLANK_PACK, filled_up
from paceline.trainer.forward import Forward


@torch.no_grad()
def score(forward: Forward, samples: Sequence[Sample], budget: int, passes: int = 0) -> list[NDArray]:
    """What a model gives each sample's sampled tokens at their temperatures; 0.0 elsewhere. With fewer micro-batches
    than `passes`, blank ones make up the number."""
    scores = [np.zeros(len(sample), np.float32) for sample in samples]
    packs = pack(samples, fold(samples), budget)
    for micro_batch in filled_up(packs, passes):
        places = forward.send(micro_batch.loss_mask.nonzero()[0])
        values, _, _ = forward.logprobs(micro_batch, places)
        stream = np.zeros(len(micro_batch), np.float32)
        stream[micro_batch.loss_mask] = values.float().cpu().numpy()
        parts = np.split(stream, np.cumsum(micro_batch.lengths)[:-1])
        for member, part in zip(micro_batch.members, parts, strict=True):
            if micro_batch is not BLANK_PACK:
                scores[member] = part
    return scores
