"""The gradient of a batch whose last groups are still being sampled.

A component's normaliser N is known only when the batch is whole. Until then its tokens are summed as if N were 1, each
component in a sum of its own; in the end

    gradient = sum_rl / N_rl + sum_ce / N_ce + sum_ref_kl / N_ref_kl

is what the whole batch at once would have given, whatever came first.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample, Scales, first_fit_decreasing, fold, pack
from paceline.data.scales import COMPONENTS
from paceline.trainer.loss import NAMES, Loss, Sums
from paceline.trainer.optimizer import MasterAdamW
from paceline.trainer.tokens import Tokens

TERMS = {"rl": ("rl", "kl", "entropy"), "ce": ("ce",), "ref_kl": ("ref_kl",)}
"""Which terms of the loss a component's normaliser divides: what holds the policy goes by the rl tokens."""
ONE = np.ones((len(COMPONENTS), 2))


class Stream:
    """Takes samples as they come and runs them in whole micro-batches."""

    def __init__(self, c: config.Trainer, optimizer: MasterAdamW) -> None:
        self._config = c
        self._optimizer = optimizer
        self._waiting: list[tuple[Sample, Scales]] = []
        self._gradients: dict[str, Mapping[str, Tensor]] = {}
        self._sums: list[Sums] = []
        self.samples: list[Sample] = []
        self.micro_batches = 0

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

    def backward(self, tokens: Tokens, anchor: Tensor, loss: Loss, version: int) -> None:
        """Add a micro-batch to the sums: one backward pass for each component it holds."""
        parts, sums = loss.parts(tokens, version)
        scales = {"rl": tokens.policy_scale, "ce": tokens.ce_scale, "ref_kl": tokens.ref_kl_scale}
        held = [name for name, scale in scales.items() if bool(scale.any())]
        for name in held:
            value = torch.stack([parts[term] for term in TERMS[name] if term in parts]).sum()
            self._optimizer.restore(self._gradients.pop(name, {}))
            self._optimizer.backward(value, anchor, again=name != held[-1])
            self._gradients[name] = self._optimizer.set_aside()
        self._sums.append(sums)
        self.micro_batches += 1

    def finish(self, totals: NDArray) -> Tensor:
        """Leave the batch's gradient with the optimizer, by the counts of all ranks; its sums for the report."""
        sums = Sums.total(self._sums) if self._sums else torch.zeros(len(NAMES), dtype=torch.float64)
        for name, (tokens, rollouts) in zip(COMPONENTS, totals, strict=True):
            share = 1 / max(1.0, float(tokens if self._config.normalise == "token" else rollouts))
            self._optimizer.restore(self._gradients.pop(name, {}), share)
            sums[[NAMES.index(f"loss_{term}") for term in TERMS[name]]] *= share
        return sums


def _packed(part: Sequence[tuple[Sample, Scales]], budget: int) -> MicroBatch:
    samples, scales = zip(*part, strict=True)
    (micro_batch,) = pack(samples, scales, budget)
    return micro_batch
