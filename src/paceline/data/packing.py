"""Packs samples into micro-batches: arrays without padding, under a token budget, of equal work for all ranks.

The loss is `rl / N_rl + ce / N_ce + teacher_kl / N_teacher_kl`, each N over one optimizer step on all ranks. Dividing
early, by one scale per token, makes the gradient a plain sum over tokens: the same however the batch is cut into
micro-batches and spread over ranks.

Under FSDP no rank goes on to micro-batch k + 1 before all have done k, so a step lasts

    sum over k of (max over ranks of cost)        and at best        sum of all costs / ranks

Tokens alone do not tell the cost: attention grows with the square of a sequence. Samples go, the longest first, where
most work is missing (longest processing time), and packs of like cost make up a row: one micro-batch of every rank.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.sample import Sample

Normalise = Literal["token", "sample", "fixed"]


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors that each token's loss is multiplied by, per component."""

    rl: NDArray
    ce: NDArray
    teacher_kl: NDArray
    regulariser: NDArray
    """For what holds an rl token whatever it is worth, such as a KL penalty: as `rl`, but with weight 1."""


def token_scales(
    samples: Sequence[Sample],
    normalise: Normalise = "token",
    fixed_length: int = 1,
    totals: NDArray | None = None,
    own: Sequence[int] | None = None,
) -> list[Scales]:
    """The scales of one optimizer step. `totals` are the counts over all ranks, where these are not all samples. Where
    they are, and others train some of them, `own` are the places of those whose scales are wanted.

    `token`: one over the component's tokens. `sample`: each rollout weighs the same, each of its tokens the same within
    it. `fixed`: one over rollouts times a constant length. N counts tokens of non-zero weight: weights scale numerators
    only.
    """
    per_owner, names = _tokens(samples), owners(samples)
    totals = _totals(per_owner) if totals is None else totals
    own = range(len(samples)) if own is None else own
    columns = []
    for name, weights in _weights([samples[i] for i in own]).items():
        part = COMPONENTS.index("rl" if name == "regulariser" else name)
        tokens, rollouts = totals[part]
        if normalise == "sample":
            divisors = [rollouts * per_owner[part][names[i]] for i in own]
        else:
            divisors = [tokens if normalise == "token" else rollouts * fixed_length] * len(own)
        columns.append([(w / np.float64(max(1, d))).astype(np.float32) for w, d in zip(weights, divisors, strict=True)])
    return [Scales(*parts) for parts in zip(*columns, strict=True)]


COMPONENTS = ("rl", "ce", "teacher_kl")


def component_counts(samples: Sequence[Sample]) -> NDArray:
    """Tokens and rollouts of each component: what ranks add up to agree on their normalisers."""
    return _totals(_tokens(samples))


def owners(samples: Sequence[Sample]) -> list:
    """Which rollout each sample is of; one without a ticket is a rollout of its own."""
    return [(s.ticket, s.rollout) if s.ticket is not None else i for i, s in enumerate(samples)]


def _tokens(samples: Sequence[Sample]) -> list[Counter]:
    """Per component, the tokens of each rollout."""
    weights, counters = _weights(samples), [Counter() for _ in COMPONENTS]
    for counter, name in zip(counters, COMPONENTS, strict=True):
        for owner, weight in zip(owners(samples), weights[name], strict=True):
            counter[owner] += int(np.count_nonzero(weight))
    return counters


def _totals(per_owner: Sequence[Counter]) -> NDArray:
    return np.array([(tokens.total(), sum(n > 0 for n in tokens.values())) for tokens in per_owner])


def _weights(samples: Sequence[Sample]) -> dict[str, list[NDArray]]:
    rl = [s.rl_token_weights for s in samples]
    ce, teacher_kl = (
        [np.zeros(len(s), np.float32) if (w := getattr(s, name)) is None else w for s in samples]
        for name in ("ce_weights", "teacher_kl_weights")
    )
    teacher_kl = [np.where(s.loss_mask, w, np.float32(0)) for s, w in zip(samples, teacher_kl, strict=True)]
    return {"rl": rl, "ce": ce, "teacher_kl": teacher_kl, "regulariser": [(w != 0).astype(np.float32) for w in rl]}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Several samples laid end to end. Streams a sample lacks are filled with what their absence means."""

    lengths: NDArray
    """Tokens of each sequence; they sum to the length of every stream below."""
    members: tuple[int, ...]
    """Which sample of the batch each sequence is."""
    names: tuple[str, ...]
    """The name of each sequence in an error."""
    token_ids: NDArray
    positions: NDArray
    loss_mask: NDArray
    logprobs: NDArray
    """NaN where the sampler was frozen: the ratio is 1 there."""
    versions: NDArray
    temperatures: NDArray
    advantages: NDArray
    rewards: NDArray
    """NaN where the sample carries none."""
    teacher_logprobs: NDArray
    kl_ref_logprobs: NDArray
    """NaN where no KL reference was asked for."""
    prox_logprobs: NDArray
    """The policy's at the batch's start; NaN where they were not asked for."""
    rl_scale: NDArray
    ce_scale: NDArray
    teacher_kl_scale: NDArray
    regulariser_scale: NDArray
    kv_kept: NDArray
    """True where keys and values of older weights were sampled on."""

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        for field in fields(self):
            stream = getattr(self, field.name)
            if field.name not in ("lengths", "members", "names") and stream.shape != (total,):
                raise AssertionError(f"packed stream `{field.name}` has shape {stream.shape}, not ({total},)")
        assert len(self.members) == len(self.lengths) == len(self.names)

    def __len__(self) -> int:
        return len(self.token_ids)


def pack(samples: Sequence[Sample], scales: Sequence[Scales], budget: int) -> list[MicroBatch]:
    """Pack by first-fit-decreasing; a sample longer than the budget is alone. Inside a micro-batch samples keep their
    order, so that tries of one example lie side by side."""
    bins = first_fit_decreasing([len(s) for s in samples], budget)
    return [collate(sorted(members), samples, dict(enumerate(scales)), {}) for members in bins]


def minibatches(samples: Sequence[Sample], number: int) -> list[list[int]]:
    """Indices of the samples of each of `number` optimizer steps: whole rollouts in their order, as evenly as they go.
    With fewer rollouts than steps the last ones are empty."""
    rollouts: dict = {}
    for index, owner in enumerate(owners(samples)):
        rollouts.setdefault(owner, []).append(index)
    whole = list(rollouts.values())
    parts = np.array_split(np.arange(len(whole)), number)
    return [sorted(i for rollout in part for i in whole[rollout]) for part in parts]


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `budget`, the longest placed first. Ties keep their order.

    >>> first_fit_decreasing([3, 6, 2, 5], budget=8)
    [[1, 2], [3, 0]]
    """
    bins: list[list[int]] = []
    heap = BinHeap(min(lengths, default=0))
    for index in longest_first(lengths):
        length = lengths[index]
        if (taken := heap.first(length)) is None:
            heap.add((len(bins), len(bins), budget - length))
            bins.append([index])
        else:
            _, place, room = taken
            bins[place].append(index)
            heap.change((place, place, room - length))
    return bins


def longest_first(lengths: Sequence[int]) -> list[int]:
    return np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()


OpenBin = tuple[float, int, int]


class BinHeap:
    """Bins, the least key first, for lengths that never grow and are never below `shortest`.

    A bin too full for one length is set aside until lengths are down to its room; it then takes any that follows, until
    something is put in. So a placement is a few heap operations, however many bins there are.
    """

    def __init__(self, shortest: int, bins: Iterable[OpenBin] = ()) -> None:
        self._shortest, self._length = shortest, 0
        self._open, self._rooms = list(bins), list[int]()
        self._aside: dict[int, list[OpenBin]] = {}
        heapify(self._open)

    def first(self, length: int) -> OpenBin | None:
        """The first bin that has room for so much."""
        opened, rooms = self._open, self._rooms
        self._length = length
        while rooms and -rooms[0] >= length:
            for bin in self._aside.pop(-heappop(rooms)):
                heappush(opened, bin)
        while opened and opened[0][2] < length:
            self._put_aside(heappop(opened))
        return opened[0] if opened else None

    def change(self, to: OpenBin) -> None:
        """Update the bin that was found, now that it holds more."""
        if to[2] >= self._length:
            heapreplace(self._open, to)
        else:
            heappop(self._open)
            self._put_aside(to)

    def add(self, bin: OpenBin) -> None:
        if bin[2] >= self._length:
            heappush(self._open, bin)
        else:
            self._put_aside(bin)

    def _put_aside(self, bin: OpenBin) -> None:
        room = bin[2]
        if room in self._aside:
            self._aside[room].append(bin)
        elif room >= self._shortest:
            self._aside[room] = [bin]
            heappush(self._rooms, -room)


def collate(
    members: Sequence[int], samples: Sequence[Sample], scales: Mapping[int, Scales], prox: Mapping[int, NDArray]
) -> MicroBatch:
    """Some samples of a batch laid end to end, by their indices in it. `prox` are log probabilities of a sample under
    the policy at the batch's start."""
    chosen = [samples[i] for i in members]
    nan, zero = np.float32(np.nan), np.float32(0)

    def filled(parts: Iterable[NDArray | None], value: np.generic) -> NDArray:
        return np.concatenate([np.full(len(s), value) if p is None else p for s, p in zip(chosen, parts, strict=True)])

    whole = ("token_ids", "loss_mask", "versions", "temperatures")
    absent = {"advantages": zero, "teacher_logprobs": zero, "logprobs": nan, "rewards": nan, "kl_ref_logprobs": nan}
    return MicroBatch(
        lengths=np.array([len(s) for s in chosen]),
        members=tuple(members),
        names=tuple(s.where for s in chosen),
        positions=np.concatenate([np.arange(len(s)) for s in chosen]),
        **{name: np.concatenate([getattr(s, name) for s in chosen]) for name in whole},
        **{name: filled((getattr(s, name) for s in chosen), value) for name, value in absent.items()},
        prox_logprobs=filled((prox.get(i) for i in members), nan),
        **{f"{name}_scale": np.concatenate([getattr(scales[i], name) for i in members]) for name in Scales.__slots__},
        kv_kept=filled((s.kv_kept for s in chosen), np.bool_(False)),
    )


def similar_lengths(lengths: list[int], waste: float = 0.3) -> list[list[int]]:
    """Indices in groups whose shortest is at least (1 - waste) of their longest, each group in its original order.
    Fewer, larger calls pay for some padding: a gap of sixteen tokens never splits a group."""
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or lengths[index] < min((1 - waste) * longest, longest - 16):
            groups.append([])
            longest = lengths[index]
        groups[-1].append(index)
    return [sorted(group) for group in groups]


Bins = list[list[int]]
RankBins = list[Bins]
"""For each rank its micro-batches, as indices of samples: equally many on every rank, some of them empty."""


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
    """Work of a sequence of n tokens: `linear * n + attention * n^2`. A balance depends only on the ratio of the two.

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


def balance_bins(lengths: Sequence[int], ranks: int, budget: int, cost: Cost) -> RankBins:
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
        cheapest = min(rows, _rows_by_cost(list(chain.from_iterable(built)), ranks), key=_rows_cost)
        rows = built if _rows_cost(built) <= (1 + COST_SLACK) * _rows_cost(cheapest) else cheapest
    return _assign_ranks(rows, ranks)


def lockstep_cost(cut: RankBins, lengths: Sequence[int], cost: Cost) -> float:
    """Cost of a step when no rank goes ahead: in each row the costliest micro-batch."""
    bins = list(chain.from_iterable(zip(*cut, strict=True)))
    return _rows_cost(_rows(_packs(bins, cost.per_sequence(lengths)), len(cut)))


def imbalance(cut: RankBins, lengths: Sequence[int], cost: Cost) -> float:
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
        if (taken := heap.first(lengths[index])) is None:
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


def _assign_ranks(rows: Iterable[Row], ranks: int) -> RankBins:
    """The costliest of a row goes to the rank that has least so far, so that sums are even too."""
    cut: RankBins = [[] for _ in range(ranks)]
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


def bin_steps(samples: Sequence[Sample], steps: int, ranks: int, budget: int, cost: Cost) -> list[RankBins]:
    """A cut for each optimizer step, whose samples do not depend on the number of ranks. One rank alone packs by first
    fit, which leaves neighbours together: they may share a prompt. A step without samples has no micro-batches."""
    out = []
    for members in minibatches(samples, steps):
        lengths = [len(samples[i]) for i in members]
        fitted = balance_bins(lengths, ranks, budget, cost) if ranks > 1 else [first_fit_decreasing(lengths, budget)]
        out.append([[[members[i] for i in bin] for bin in bins] for bins in fitted])
    return out


def restrict_bins(some: Sequence[RankBins], chosen: Collection[int]) -> RankBins:
    """The micro-batches of several steps, without samples that are not chosen. Where no rank has any in its k-th
    micro-batch there is none: they are still equally many on every rank.

    >>> restrict_bins([[[[0, 1], [2]], [[3], [4]]], [[[5]], [[]]]], {0, 4})
    [[[0], []], [[], [4]]]
    """
    rows = (row for cut in some for row in zip(*cut, strict=True))
    left = [[[i for i in bin if i in chosen] for bin in row] for row in rows]
    return [[row[rank] for row in left if any(row)] for rank in range(len(some[0]))]


def flatten_bins(bins: Iterable[list[int]]) -> list[int]:
    """All samples of some micro-batches, in their order in the batch."""
    return sorted(chain.from_iterable(bins))


def all_members(cut: RankBins) -> list[int]:
    """All samples of a step, whichever rank has them."""
    return flatten_bins(chain.from_iterable(cut))
