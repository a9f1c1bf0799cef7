"""Parts of an optimizer step: the tokens that train, gradient norms, and the sums of a batch that still comes in.

A component's normaliser N is known only when the batch is whole. Until then its tokens are summed as if N were 1, each
component in a sum of its own; in the end

    gradient = sum_rl / N_rl + sum_ce / N_ce + sum_ref_kl / N_ref_kl

is what the whole batch at once would have given, whatever came first.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample, Scales, first_fit_decreasing, fold, pack
from paceline.data.scales import COMPONENTS
from paceline.trainer.loss import NAMES, LossStats
from paceline.trainer.ops import stack
from paceline.trainer.optimizer import MasterOptimizer
from paceline.weights.update import Array

TERMS = {"rl": ("rl", "kl", "entropy"), "ce": ("ce",), "ref_kl": ("ref_kl",)}
"""Terms of the loss that a component's normaliser divides: KL and entropy go by the rl tokens."""
SCALE_OF = {"rl": "policy_scale", "ce": "ce_scale", "ref_kl": "ref_kl_scale"}
"""The scale that marks a component's tokens."""
ONE = np.ones((len(COMPONENTS), 2))


def components(micro_batch: MicroBatch) -> list[str]:
    """Those that it holds tokens of."""
    return [name for name, scale in SCALE_OF.items() if getattr(micro_batch, scale).any()]


def component(parts: Mapping[str, Array], name: str) -> Array:
    """Its share of a loss that is known term by term."""
    return stack(*(parts[term] for term in TERMS[name] if term in parts)).sum()


class Stream:
    """Takes samples as they come and runs them in whole micro-batches."""

    def __init__(self, c: config.TrainerConfig, optimizer: MasterOptimizer) -> None:
        self._config = c
        self._optimizer = optimizer
        self._waiting: list[tuple[Sample, Scales]] = []
        self._gradients: dict[str, Mapping[str, Array]] = {}
        self.sums: list[LossStats] = []
        """Of the micro-batches that ran."""
        self.samples: list[Sample] = []

    def add(self, samples: Sequence[Sample], budget: int, last: bool = False) -> list[MicroBatch]:
        """The micro-batches to run now. The emptiest waits for what comes, unless these samples are the last."""
        self.samples += samples
        # Now, while all of a rollout's samples are at hand: their lengths may count together.
        scales = fold(samples, self._config.normalise, self._config.fixed_length, ONE)
        self._waiting += zip(samples, scales, strict=True)
        lengths = [len(sample) for sample, _ in self._waiting]
        bins = first_fit_decreasing(lengths, budget)
        emptiest = [] if last else min(bins, key=lambda members: sum(lengths[i] for i in members), default=[])
        waiting, self._waiting = self._waiting, [self._waiting[i] for i in sorted(emptiest)]
        full = [[waiting[i] for i in sorted(members)] for members in bins if members is not emptiest]
        return [pack([sample for sample, _ in part], [scale for _, scale in part], budget)[0] for part in full]

    @contextmanager
    def summing(self, name: str) -> Generator[None]:
        """Gradients added to the optimizer inside belong to this component."""
        self._optimizer.add_gradients(self._gradients.pop(name, {}))
        yield
        self._gradients[name] = self._optimizer.take_gradients()

    def finish(self, totals: NDArray) -> NDArray:
        """Leave the batch's gradient with the optimizer, by the counts of all ranks; answers with the share that each
        of `loss.NAMES` has yet to be multiplied by."""
        shares = np.ones(len(NAMES))
        for name, (tokens, rollouts) in zip(COMPONENTS, totals, strict=True):
            share = 1 / max(1.0, float(tokens if self._config.normalise == "token" else rollouts))
            self._optimizer.add_gradients(self._gradients.pop(name, {}), share)
            shares[[NAMES.index(f"loss_{term}") for term in TERMS[name]]] = share
        return shares


KEPT = 32
"""Steps the median is of: enough to be calm, few enough to follow a run whose gradients shrink."""
WARM_UP = 8
"""Steps before anything is judged: a run's first gradients say little about the next."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One optimizer step."""

    sums: NDArray
    """Of all its tokens, in the order of `loss.NAMES`."""
    grad_norm: float
    micro_batches: int
    trouble: str = ""
    """Why it was left out; empty if it was taken."""

    @property
    def finite(self) -> bool:
        return isfinite(self.grad_norm) and self.sound

    @property
    def sound(self) -> bool:
        """Nothing is wrong with the loss; the gradient may still have overflown."""
        return bool(np.isfinite(self.sums).all())


class GradientNorms:
    """The norms, before clipping, of the last gradients that were stepped on.

    A gradient whose norm is above `spike` times their median is a spike. The median and not the mean, and spikes are
    never kept, so that one cannot make room for the next. `summed` adds a number up over the ranks.
    """

    def __init__(self, spike: float | None, summed: Callable[[float], float] = float) -> None:
        self._spike, self._summed = spike, summed
        self._last: deque[float] = deque(maxlen=KEPT)

    def add(self, norm: float) -> None:
        """A step was taken. One without a gradient is no measure."""
        if norm > 0:
            self._last.append(norm)

    def trouble(self, outcome: StepOutcome) -> str:
        """What is wrong with a gradient; empty if nothing is."""
        if not outcome.finite:
            return "the gradient was not finite"
        if self._spike is None:
            return ""
        usual, trouble = median(self._last) if len(self._last) >= WARM_UP else inf, ""
        if outcome.grad_norm > self._spike * usual:
            trouble = (
                f"the gradient's norm was {outcome.grad_norm:.3g}, {outcome.grad_norm / usual:.3g} times the median of "
                f"the last {len(self._last)} steps (trainer.spike allows {self._spike:g})"
            )
        # All ranks have the same gradient; should one round its norm differently, still all step or none does.
        votes = self._summed(float(bool(trouble)))
        return trouble or ("another rank saw the gradient's norm jump" if votes else "")

    def state(self) -> list[float]:
        return list(self._last)

    def load(self, norms: Iterable[float]) -> None:
        self._last = deque(norms, maxlen=KEPT)


STREAMS = ("versions", "advantages", "ref_logprobs", "base_logprobs", "prox_logprobs", "kv_kept")
SCALES = ("rl_scale", "ce_scale", "ref_kl_scale", "policy_scale")


def trained(micro_batch: MicroBatch) -> NDArray:
    """Places of the tokens that any component trains."""
    return np.logical_or.reduce([getattr(micro_batch, name) != 0 for name in SCALES]).nonzero()[0]


def streams_of(micro_batch: MicroBatch) -> dict[str, NDArray]:
    """The streams of `TrainedTokens`, but for those that the policy computes."""
    places = trained(micro_batch)
    owners = np.repeat(np.arange(len(micro_batch.lengths)), micro_batch.lengths)
    streams = {name: getattr(micro_batch, name) for name in (*STREAMS, *SCALES)}
    streams |= {"behaviour": micro_batch.logprobs, "segments": owners}
    return {name: stream[places] for name, stream in streams.items()}
