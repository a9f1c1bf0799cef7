"""Packs samples into micro-batches: arrays without padding, under a token budget.

Folds the loss's normalisers into one per-token scale before the forward pass.

The loss is `rl / N_rl + ce / N_ce + ref_kl / N_ref_kl`, each N over one optimizer step on all ranks. Dividing early
makes the gradient a plain sum over tokens: the same however the batch is cut into micro-batches and spread over ranks.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from heapq import heapify, heappop, heappush, heapreplace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.data.sample import Sample

Normalise = Literal["token", "sample", "fixed"]


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors that each token's loss is multiplied by, per component."""

    rl: NDArray
    ce: NDArray
    ref_kl: NDArray
    unweighted: NDArray
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
        part = COMPONENTS.index("rl" if name == "unweighted" else name)
        tokens, rollouts = totals[part]
        match normalise:
            case "token":
                divisors = [tokens] * len(own)
            case "sample":
                divisors = [rollouts * per_owner[part][names[i]] for i in own]
            case "fixed":
                divisors = [rollouts * fixed_length] * len(own)
        columns.append([(w / np.float64(max(1, d))).astype(np.float32) for w, d in zip(weights, divisors, strict=True)])
    return [Scales(*parts) for parts in zip(*columns, strict=True)]


COMPONENTS = ("rl", "ce", "ref_kl")


def component_counts(samples: Sequence[Sample]) -> NDArray:
    """Tokens and rollouts of each component: what ranks add up to agree on their normalisers."""
    return _totals(_tokens(samples))


def owners(samples: Sequence[Sample]) -> list:
    """Which rollout each sample is of; one without a ticket is a rollout of its own."""
    return [(s.ticket, s.rollout) if s.ticket is not None else i for i, s in enumerate(samples)]


def _tokens(samples: Sequence[Sample]) -> list[Counter]:
    """Per component, the tokens of each rollout."""
    weights = _weights(samples)
    counters = [Counter() for _ in COMPONENTS]
    for counter, name in zip(counters, COMPONENTS, strict=True):
        for owner, weight in zip(owners(samples), weights[name], strict=True):
            counter[owner] += int(np.count_nonzero(weight))
    return counters


def _totals(per_owner: Sequence[Counter]) -> NDArray:
    return np.array([(tokens.total(), sum(n > 0 for n in tokens.values())) for tokens in per_owner])


def _weights(samples: Sequence[Sample]) -> dict[str, list[NDArray]]:
    rl = [s.rl for s in samples]
    ce = [_stream(s, "ce_weights") for s in samples]
    ref_kl = [np.where(s.loss_mask, _stream(s, "ref_kl_weights"), np.float32(0)) for s in samples]
    return {"rl": rl, "ce": ce, "ref_kl": ref_kl, "unweighted": [(w != 0).astype(np.float32) for w in rl]}


def _stream(sample: Sample, name: str) -> NDArray:
    stream = getattr(sample, name)
    return np.zeros(len(sample), np.float32) if stream is None else stream


OpenBin = tuple[float, int, int]
"""A bin by its key, its number and its room."""


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
    ref_kl_scale: NDArray
    unweighted_scale: NDArray
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
    """Pack by first-fit-decreasing. A sample longer than the budget gets a micro-batch of its own.

    Inside a micro-batch samples keep their order, so that tries of one example lie side by side.
    """
    bins = first_fit_decreasing([len(s) for s in samples], budget)
    return [collate(sorted(members), samples, dict(enumerate(scales)), {}) for members in bins]


def minibatches(samples: Sequence[Sample], number: int) -> list[list[int]]:
    """Indices of the samples of each of `number` optimizer steps: whole rollouts in their order, as evenly as they go.

    With fewer rollouts than steps the last ones are empty.
    """
    rollouts: dict = {}
    for index, owner in enumerate(owners(samples)):
        rollouts.setdefault(owner, []).append(index)
    whole = list(rollouts.values())
    parts = np.array_split(np.arange(len(whole)), number)
    return [sorted(i for rollout in part for i in whole[rollout]) for part in parts]


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `budget`, the longest placed first.

    Ties keep their order, so the cut is a pure function of the lengths.

    >>> first_fit_decreasing([3, 6, 2, 5], budget=8)
    [[1, 2], [3, 0]]
    """
    bins: list[list[int]] = []
    heap = BinHeap(min(lengths, default=0))
    for index in longest_first(lengths):
        length = lengths[index]
        taken = heap.first(length)
        if taken is None:
            heap.add((len(bins), len(bins), budget - length))
            bins.append([index])
        else:
            _, place, room = taken
            bins[place].append(index)
            heap.change((place, place, room - length))
    return bins


def longest_first(lengths: Sequence[int]) -> list[int]:
    """All indices; ties keep their order."""
    return np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()


class BinHeap:
    """Bins, the least key first, for lengths that never grow and are never below `shortest`.

    A bin too full for one length is set aside until lengths are down to its room; it then takes any that follows, until
    something is put in. So a placement is a few heap operations, however many bins there are.
    """

    def __init__(self, shortest: int, bins: Iterable[OpenBin] = ()) -> None:
        self._shortest = shortest
        self._open = list(bins)
        self._aside: dict[int, list[OpenBin]] = {}
        self._rooms: list[int] = []
        self._length = 0
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

    Fewer, larger calls pay for some padding: a gap of sixteen tokens never splits a group.
    """
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or lengths[index] < min((1 - waste) * longest, longest - 16):
            groups.append([])
            longest = lengths[index]
        groups[-1].append(index)
    return [sorted(group) for group in groups]
