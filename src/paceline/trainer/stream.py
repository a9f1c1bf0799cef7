"""Sums the gradient of a batch whose last groups are still being sampled.

A component's normaliser N is known only when the batch is whole. Until then its tokens are summed as if N were 1, each
component in a sum of its own; in the end

    gradient = sum_rl / N_rl + sum_ce / N_ce + sum_ref_kl / N_ref_kl

is what the whole batch at once would have given, whatever came first.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample, Scales, first_fit_decreasing, fold, pack
from paceline.data.scales import COMPONENTS
from paceline.model.weights import Array
from paceline.trainer.loss import NAMES, LossStats
from paceline.trainer.ops import stack

TERMS = {"rl": ("rl", "kl", "entropy"), "ce": ("ce",), "ref_kl": ("ref_kl",)}
"""Terms of the loss that a component's normaliser divides: KL and entropy go by the rl tokens."""
SCALE_OF = {"rl": "policy_scale", "ce": "ce_scale", "ref_kl": "ref_kl_scale"}
"""The scale that marks a component's tokens."""
ONE = np.ones((len(COMPONENTS), 2))


class Summing(Protocol):
    """An optimizer whose gradient so far can be put aside and taken up again."""

    def set_aside(self) -> Mapping[str, Array]: ...
    def restore(self, held: Mapping[str, Array], factor: float = 1.0) -> None: ...


def components(micro_batch: MicroBatch) -> list[str]:
    """Those that it holds tokens of."""
    return [name for name, scale in SCALE_OF.items() if getattr(micro_batch, scale).any()]


def component(parts: Mapping[str, Array], name: str) -> Array:
    """Its share of a loss that is known term by term."""
    return stack([parts[term] for term in TERMS[name] if term in parts]).sum()


class Stream:
    """Takes samples as they come and runs them in whole micro-batches."""

    def __init__(self, c: config.TrainerConfig, optimizer: Summing) -> None:
        self._config = c
        self._optimizer = optimizer
        self._waiting: list[tuple[Sample, Scales]] = []
        self._gradients: dict[str, Mapping[str, Array]] = {}
        self.sums: list[LossStats] = []
        """Of the micro-batches that ran."""
        self.samples: list[Sample] = []

    def add(self, samples: Sequence[Sample], budget: int) -> list[MicroBatch]:
        """The micro-batches to run now. The emptiest waits for what comes, or for `rest`."""
        self.samples += samples
        # Now, while all of a rollout's samples are at hand: their lengths may count together.
        scales = fold(samples, self._config.normalise, self._config.fixed_length, ONE)
        self._waiting += zip(samples, scales, strict=True)
        lengths = [len(sample) for sample, _ in self._waiting]
        bins = first_fit_decreasing(lengths, budget)
        if len(bins) < 2:
            return []
        emptiest = min(bins, key=lambda members: sum(lengths[i] for i in members))
        parts = [[self._waiting[i] for i in sorted(members)] for members in bins if members is not emptiest]
        self._waiting = [self._waiting[i] for i in sorted(emptiest)]
        return [_packed(part, budget) for part in parts]

    def rest(self, budget: int) -> list[MicroBatch]:
        """Nothing more comes: what still waits."""
        last, self._waiting = self._waiting, []
        return [_packed(last, budget)] if last else []

    @contextmanager
    def summing(self, name: str) -> Generator[None]:
        """Gradients added to the optimizer inside belong to this component."""
        self._optimizer.restore(self._gradients.pop(name, {}))
        yield
        self._gradients[name] = self._optimizer.set_aside()

    def finish(self, totals: NDArray) -> NDArray:
        """Leave the batch's gradient with the optimizer, by the counts of all ranks; answers with the share that each
        of `loss.NAMES` has yet to be multiplied by."""
        shares = np.ones(len(NAMES))
        for name, (tokens, rollouts) in zip(COMPONENTS, totals, strict=True):
            share = 1 / max(1.0, float(tokens if self._config.normalise == "token" else rollouts))
            self._optimizer.restore(self._gradients.pop(name, {}), share)
            shares[[NAMES.index(f"loss_{term}") for term in TERMS[name]]] = share
        return shares


def _packed(part: Sequence[tuple[Sample, Scales]], budget: int) -> MicroBatch:
    samples, scales = zip(*part, strict=True)
    (micro_batch,) = pack(samples, scales, budget)
    return micro_batch
