"""What a rank runs that has less to do than the others: a pass in which nothing trains."""

from collections.abc import Sequence

import numpy as np

from paceline.data import MicroBatch, Sample, fold, pack

BLANK = Sample(token_ids=np.zeros(2), loss_mask=np.zeros(2), versions=np.full(2, -1), temperatures=np.ones(2))
"""What a rank without samples runs, so that every rank runs something. Nothing in it trains."""
(BLANK_PACK,) = pack([BLANK], fold([BLANK]), len(BLANK))


def filled_up(packs: Sequence[MicroBatch], passes: int) -> list[MicroBatch]:
    """Blank micro-batches after the others until there are so many: nothing is dropped, and every rank runs equally
    often."""
    return [*packs, *[BLANK_PACK] * (passes - len(packs))]
