"""Runs each sample of a batch alone, to find those that broke a step or made its gradient jump."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from paceline.data import Sample
from paceline.trainer.learner import Learner
from paceline.trainer.ops import all_finite

SHOWN = 3
"""Samples that a sentence names."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sample's share of the batch's loss, term by term, and the norm of its share of the gradient."""

    sample: Sample
    losses: Mapping[str, float]
    grad_norm: float

    @property
    def broken(self) -> list[str]:
        """The values that are not finite: streams of the sample, then the losses and gradient they led to."""
        streams = [name for name, values in self.sample.streams().items() if not np.isfinite(values).all()]
        losses = [f"loss/{name}" for name, value in self.losses.items() if not math.isfinite(value)]
        return [*streams, *losses, *([] if math.isfinite(self.grad_norm) else ["gradient"])]


def examine(learner: Learner, samples: Sequence[Sample], version: int) -> list[Finding]:
    """Each sample alone at the present weights. Nothing is stepped on."""
    found = []
    for sample, micro_batch in zip(samples, learner.alone(samples), strict=True):
        sums = learner.stepper.backward(micro_batch, version).values
        norm = float(learner.optimizer.clip())
        learner.optimizer.zero()
        losses = {name.removeprefix("loss_"): float(x) for name, x in sums.items() if name.startswith("loss_")}
        found.append(Finding(sample, losses, norm))
    return found


def broken_weights(learner: Learner) -> list[str]:
    """Weights that are not finite, by name."""
    return [name for name, master in learner.optimizer.masters.items() if not all_finite(master)]


def verdict(findings: Sequence[Finding], weights: Sequence[str]) -> str:
    """In a sentence: which samples are not finite, or that the `weights` of these names are not, or else which sample's
    gradient is the largest."""
    if weights:
        more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        return f"the weights are not finite before this batch (`{weights[0]}`{more}): go back to an older checkpoint"
    broken = [finding for finding in findings if finding.broken]
    if broken:
        named = "; ".join(f"{f.sample.where} ({', '.join(f.broken)})" for f in broken[:SHOWN])
        more = f"; and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
        return f"{len(broken)} of {len(findings)} samples are not finite: {named}{more}"
    if not findings:
        return "the batch holds no samples"
    largest = max(findings, key=lambda finding: finding.grad_norm)
    usual = median(finding.grad_norm for finding in findings)
    times = f", {largest.grad_norm / usual:.3g} times the batch's median" if usual else ""
    return (
        f"every sample is finite with these weights; the largest gradient is that of {largest.sample.where}: norm "
        f"{largest.grad_norm:.3g}{times}"
    )
