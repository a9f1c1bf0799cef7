"""Builds micro-batches of equal work for ranks that run them in lockstep.

Under FSDP no rank goes on to micro-batch k + 1 before all have done k, so a step lasts

    sum over k of (max over ranks of cost)        and at best        sum of all costs / ranks

Tokens alone do not tell the cost: attention grows with the square of a sequence. Samples go, the longest first, where
most work is missing (longest processing time), and packs of like cost make up a row: one micro-batch of every rank.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.packing import BinHeap, first_fit_decreasing, longest_first, minibatches
from paceline.data.sample import Sample

Bins = list[list[int]]


class Pack(NamedTuple):
    cost: float
    members: list[int]


Row = Sequence[Pack]
"""One micro-batch of every rank."""
_cost = attrgetter("cost")
COST_SLACK = 0.02
"""Share that rows of like packs may cost above the cheapest found: they stay even where the cost is misjudged."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of a sequence of n tokens: `linear * n + attention * n^2`. A pack's is the sum over its sequences.

    A balance depends only on the ratio of the two.

    >>> Cost(linear=1, attention=0.5)([2, 4])
    16.0
    """

    linear: float
    attention: float

    def __call__(self, lengths: Sequence[int]) -> float:
        return float(self.per_sequence(lengths).sum())

    def per_sequence(self, lengths: Sequence[int]) -> NDArray:
        n = np.asarray(lengths, np.float64)
        return self.linear * n + self.attention * n * n


def balance_bins(lengths: Sequence[int], ranks: int, budget: int, cost: Cost) -> list[Bins]:
    """For each rank its micro-batches, as indices of samples: equally many on every rank, the costliest row first.

    Each holds at most `budget` tokens, or one longer sample alone; they are as few as first-fit-decreasing needs. With
    fewer samples than micro-batches some are empty: a rank runs a dummy there. Ties keep their order, so the cut is
    a pure function of the arguments.

    >>> balance_bins([9, 1, 5, 4, 8, 2], ranks=2, budget=10, cost=Cost(1, 0))
    [[[0], [3, 5]], [[4, 1], [2]]]
    """
    assert ranks > 0
    assert budget > 0
    lengths, costs = np.asarray(lengths, int).tolist(), cost.per_sequence(lengths)
    rows = _rows_by_cost(_packs(first_fit_decreasing(lengths, budget), costs), ranks)
    built = _fill_rows(lengths, costs, len(rows), ranks, budget)
    if built is not None:
        cheapest = min(rows, _rows_by_cost([pack for row in built for pack in row], ranks), key=_rows_cost)
        rows = built if _rows_cost(built) <= (1 + COST_SLACK) * _rows_cost(cheapest) else cheapest
    return _assign_ranks(rows, ranks)


def lockstep_cost(cut: Sequence[Bins], lengths: Sequence[int], cost: Cost) -> float:
    """Cost of a step when no rank goes ahead: in each row the costliest micro-batch."""
    bins = [members for row in zip(*cut, strict=True) for members in row]
    return _rows_cost(_rows(_packs(bins, cost.per_sequence(lengths)), len(cut)))


def imbalance(cut: Sequence[Bins], lengths: Sequence[int], cost: Cost) -> float:
    """The share by which a step in lockstep costs more than if all work were spread evenly: 0 at best."""
    ideal = cost(lengths) / len(cut)
    return lockstep_cost(cut, lengths, cost) / ideal - 1 if ideal else 0.0


def _fill_rows(lengths: Sequence[int], costs: NDArray, rows: int, ranks: int, budget: int) -> list[Row] | None:
    """Rows filled together: the longest first, each into the bin that lacks most of what its row should cost. None
    where one does not fit any more.

    The longest `ranks` samples begin the first row, the next ones the second: packs of a row are alike in what they
    hold, and so in cost even where the two numbers of `Cost` are off.
    """
    order = longest_first(lengths)
    first, others = order[: rows * ranks], order[rows * ranks :]
    work = costs.tolist()
    targets = _targets([work[i] for i in first[::ranks]], rows, sum(work) / ranks)
    bins: Bins = [[i] for i in first] + [[] for _ in range(rows * ranks - len(first))]
    begun = ((work[i] - targets[place // ranks], place, budget - lengths[i]) for place, i in enumerate(first))
    heap = BinHeap(lengths[order[-1]] if order else 0, begun)
    for index in others:
        taken = heap.first(lengths[index])
        if taken is None:
            return None
        lacks, place, room = taken
        bins[place].append(index)
        heap.change((lacks + work[index], place, room - lengths[index]))
    return _rows(_packs(bins, costs), ranks)


def _targets(longest: Sequence[float], rows: int, share: float) -> list[float]:
    """Cost each row should have, all together a rank's `share`. Rows begin with `longest`, which falls: those that are
    above the level of the others by that alone stay there."""
    floors = [*longest, *[0.0] * (rows - len(longest))]
    left = share
    for done, floor in enumerate(floors):
        level = left / (rows - done)
        if floor <= level:
            return [*floors[:done], *[level] * (rows - done)]
        left -= floor
    return floors


def _rows_by_cost(packs: Sequence[Pack], ranks: int) -> list[Row]:
    """Rows of packs next to each other in cost: no other rows of these packs are cheaper."""
    empty = [Pack(0.0, []) for _ in range(-len(packs) % ranks)]
    return _rows([*sorted(packs, key=_cost, reverse=True), *empty], ranks)


def _rows(packs: Sequence[Pack], ranks: int) -> list[Row]:
    return [packs[start : start + ranks] for start in range(0, len(packs), ranks)]


def _assign_ranks(rows: Iterable[Row], ranks: int) -> list[Bins]:
    """The costliest of a row goes to the rank that has least so far: sums are even too, for ranks that do not wait."""
    cut: list[Bins] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    falling = (sorted(row, key=_cost, reverse=True) for row in rows)
    for row in sorted(falling, key=lambda row: -row[0].cost):
        for rank, pack in zip(sorted(range(ranks), key=totals.__getitem__), row, strict=True):
            cut[rank].append(pack.members)
            totals[rank] += pack.cost
    return cut


def _rows_cost(rows: Iterable[Row]) -> float:
    return sum(max(row, key=_cost).cost for row in rows)


def _packs(bins: Sequence[list[int]], costs: NDArray) -> list[Pack]:
    owners = np.repeat(np.arange(len(bins)), [len(members) for members in bins])
    members = np.fromiter(chain.from_iterable(bins), int, len(owners))
    return list(map(Pack, np.bincount(owners, costs[members], len(bins)).tolist(), bins))


Cut = list[Bins]
"""For each rank its micro-batches, as indices of samples: equally many on every rank, some of them empty."""


def cut_steps(samples: Sequence[Sample], steps: int, ranks: int, budget: int, cost: Cost) -> list[Cut]:
    """A cut for each optimizer step, whose samples do not depend on the number of ranks. One rank alone packs by first
    fit, which leaves neighbours together: they may share a prompt. A step without samples has no micro-batches."""
    out = []
    for members in minibatches(samples, steps):
        lengths = [len(samples[i]) for i in members]
        fitted = balance_bins(lengths, ranks, budget, cost) if ranks > 1 else [first_fit_decreasing(lengths, budget)]
        out.append([[[members[i] for i in bin] for bin in bins] for bins in fitted])
    return out


def restrict_cuts(some: Sequence[Cut], chosen: Collection[int]) -> Cut:
    """The cuts of several steps as one that leaves out samples that are not chosen. Where no rank has any in its k-th
    micro-batch there is none: they are still equally many on every rank.

    >>> restrict_cuts([[[[0, 1], [2]], [[3], [4]]], [[[5]], [[]]]], {0, 4})
    [[[0], []], [[], [4]]]
    """
    rows = (row for cut in some for row in zip(*cut, strict=True))
    left = [[[i for i in bin if i in chosen] for bin in row] for row in rows]
    return [[row[rank] for row in left if any(row)] for rank in range(len(some[0]))]


def flatten_bins(bins: Bins) -> list[int]:
    """All samples of some micro-batches, in their order in the batch."""
    return sorted(i for bin in bins for i in bin)


def all_members(cut: Cut) -> list[int]:
    """All samples of a step, whichever rank has them."""
    return flatten_bins([bin for bins in cut for bin in bins])
