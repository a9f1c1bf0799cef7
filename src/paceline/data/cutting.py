"""How a batch is cut, once for all ranks: into optimizer steps, ranks and micro-batches.

A pure function of the whole batch. Ranks that know it find the same cut without a word to each other.
"""

from collections.abc import Collection, Sequence

from paceline.data.balance import Bins, Cost, balanced
from paceline.data.packing import first_fit_decreasing, minibatches
from paceline.data.sample import Sample

Cut = list[Bins]
"""For each rank its micro-batches, as indices of samples: equally many on every rank, some of them empty."""


def cuts(samples: Sequence[Sample], steps: int, ranks: int, budget: int, cost: Cost) -> list[Cut]:
    """A cut for each optimizer step, whose samples do not hang on the number of ranks. One rank alone packs by first
    fit, which leaves neighbours together: they may share a prompt. A step without samples has no micro-batches."""
    out = []
    for members in minibatches(samples, steps):
        lengths = [len(samples[i]) for i in members]
        fitted = balanced(lengths, ranks, budget, cost) if ranks > 1 else [first_fit_decreasing(lengths, budget)]
        out.append([[[members[i] for i in places] for places in bins] for bins in fitted])
    return out


def only(some: Sequence[Cut], chosen: Collection[int]) -> Cut:
    """The cuts of several steps as one that leaves out samples that are not chosen. Where no rank has any in its k-th
    micro-batch there is none: they are still equally many on every rank.

    >>> only([[[[0, 1], [2]], [[3], [4]]], [[[5]], [[]]]], {0, 4})
    [[[0], []], [[], [4]]]
    """
    rows = (row for cut in some for row in zip(*cut, strict=True))
    left = [[[i for i in places if i in chosen] for places in row] for row in rows]
    return [[row[rank] for row in left if any(row)] for rank in range(len(some[0]))]


def held(bins: Bins) -> list[int]:
    """All samples of some micro-batches, in their order in the batch."""
    return sorted(i for places in bins for i in places)


def everyone(cut: Cut) -> list[int]:
    """All samples of a step, whichever rank has them."""
    return held([places for bins in cut for places in bins])
