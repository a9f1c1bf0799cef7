"""Samples become micro-batches: packed arrays without padding, under a token budget."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from paceline.data.sample import Sample
from paceline.data.scales import Scales, owners


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Several samples laid end to end. Streams a sample lacks are filled with what their absence means."""

    lengths: NDArray
    """Tokens of each sequence; they sum to the length of every stream below."""
    members: tuple[int, ...]
    """Which sample of the batch each sequence is."""
    names: tuple[str, ...]
    """What each sequence is called in an error."""
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
    ref_logprobs: NDArray
    base_logprobs: NDArray
    """NaN where no KL reference was asked for."""
    prox_logprobs: NDArray
    """The policy's at the batch's start; NaN where nobody asked for them."""
    rl_scale: NDArray
    ce_scale: NDArray
    ref_kl_scale: NDArray
    policy_scale: NDArray

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        for field in fields(self):
            stream = getattr(self, field.name)
            if field.name not in ("lengths", "members", "names") and stream.shape != (total,):
                raise AssertionError(f"packed stream `{field.name}` has shape {stream.shape}, not ({total},)")
        assert len(self.members) == len(self.lengths) == len(self.names)

    def __len__(self) -> int:
        return len(self.token_ids)


def pack(
    samples: Sequence[Sample], scales: Sequence[Scales], budget: int, prox: Sequence[NDArray | None] | None = None
) -> list[MicroBatch]:
    """Pack by first-fit-decreasing. A sample longer than the budget gets a micro-batch of its own.

    Inside a micro-batch samples keep their order, so that tries of one example lie side by side. `prox` are the log
    probabilities of each sample under the policy at the batch's start.
    """
    bins = first_fit_decreasing([len(s) for s in samples], budget)
    return [_join(sorted(members), samples, scales, prox or [None] * len(samples)) for members in bins]


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
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        place = next((b for b, free in enumerate(room) if free >= length), None)
        if place is None:
            bins.append([index])
            room.append(budget - length)
        else:
            bins[place].append(index)
            room[place] -= length
    return bins


def _join(
    members: Sequence[int], samples: Sequence[Sample], scales: Sequence[Scales], prox: Sequence[NDArray | None]
) -> MicroBatch:
    chosen = [samples[i] for i in members]
    nan, zero = np.float32(np.nan), np.float32(0)

    def filled(parts: Iterable[NDArray | None], absent: np.float32) -> NDArray:
        return np.concatenate([np.full(len(s), absent) if p is None else p for s, p in zip(chosen, parts, strict=True)])

    def joined(name: str, absent: np.float32) -> NDArray:
        return filled((getattr(s, name) for s in chosen), absent)

    return MicroBatch(
        lengths=np.array([len(s) for s in chosen]),
        members=tuple(members),
        names=tuple(s.where for s in chosen),
        token_ids=np.concatenate([s.token_ids for s in chosen]),
        positions=np.concatenate([np.arange(len(s)) for s in chosen]),
        loss_mask=np.concatenate([s.loss_mask for s in chosen]),
        versions=np.concatenate([s.versions for s in chosen]),
        temperatures=np.concatenate([s.temperatures for s in chosen]),
        logprobs=joined("logprobs", nan),
        advantages=joined("advantages", zero),
        rewards=joined("rewards", nan),
        ref_logprobs=joined("ref_logprobs", zero),
        base_logprobs=joined("base_logprobs", nan),
        prox_logprobs=filled((prox[i] for i in members), nan),
        rl_scale=np.concatenate([scales[i].rl for i in members]),
        ce_scale=np.concatenate([scales[i].ce for i in members]),
        ref_kl_scale=np.concatenate([scales[i].ref_kl for i in members]),
        policy_scale=np.concatenate([scales[i].policy for i in members]),
    )
