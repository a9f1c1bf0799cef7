"""What a rank runs that has less to do than the others: a pass in which nothing trains."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.data import MicroBatch, Sample, Scales, fold, lay, pack
from paceline.data.balance import Bins

BLANK = Sample(token_ids=np.zeros(2), loss_mask=np.zeros(2), versions=np.full(2, -1), temperatures=np.ones(2))
"""What a rank without samples runs, so that every rank runs something. Nothing in it trains."""
(BLANK_PACK,) = pack([BLANK], fold([BLANK]), len(BLANK))


def packed(
    samples: Sequence[Sample], scales: Mapping[int, Scales], bins: Bins, prox: Mapping[int, NDArray]
) -> list[MicroBatch]:
    """A rank's micro-batches as all have agreed on them; where it has nothing, a blank one. Nothing is dropped, and
    every rank runs equally many."""
    return [lay(sorted(members), samples, scales, prox) if members else BLANK_PACK for members in bins]
