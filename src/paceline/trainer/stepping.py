"""One optimizer step of the policy: a gradient, and a verdict on it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import MicroBatch
from paceline.trainer.loss import Judged, Loss, Sums
from paceline.trainer.norms import Norms, Outcome
from paceline.trainer.tokens import Tokens

STREAMS = ("versions", "advantages", "ref_logprobs", "base_logprobs", "prox_logprobs")
SCALES = ("rl_scale", "ce_scale", "ref_kl_scale", "policy_scale")


def trained(micro_batch: MicroBatch) -> NDArray:
    """Places of the tokens that any component trains."""
    return np.logical_or.reduce([getattr(micro_batch, name) != 0 for name in SCALES]).nonzero()[0]


def streams_of(micro_batch: MicroBatch) -> dict[str, NDArray]:
    """What `Tokens` has of the tokens that train, but for what the policy says of them."""
    places = trained(micro_batch)
    owners = np.repeat(np.arange(len(micro_batch.lengths)), micro_batch.lengths)
    streams = {name: getattr(micro_batch, name) for name in (*STREAMS, *SCALES)}
    streams |= {"behaviour": micro_batch.logprobs, "segments": owners}
    return {name: stream[places] for name, stream in streams.items()}


class Optimizer(Protocol):
    """Gradient sums and what is done with them."""

    def retreat(self, sound: bool) -> bool: ...
    def zero(self) -> None: ...
    def step(self) -> None: ...


class Stepper(ABC):
    """Turns micro-batches into a step, which is taken or left out."""

    def __init__(self, c: config.Trainer, optimizer: Optimizer, summed: Callable[[float], float] = float) -> None:
        self._config, self._taker = c, optimizer
        self._loss = Loss(c)
        self.norms = Norms(c.spike, summed)
        self.watch: Callable[[MicroBatch, Tokens, Judged], None] | None = None
        """Told of every micro-batch of a step what each of its tokens says; `paceline replay` looks on."""

    def step(self, packs: Sequence[MicroBatch], version: int, first: bool, trains: bool) -> Outcome:
        """From scratch. `trains` says whether any token of any rank does."""
        outcome = self._gradient(packs, version, first)
        while not outcome.finite and self._taker.retreat(outcome.sound):
            outcome = self._gradient(packs, version, first)
        return self._taken(outcome, trains)

    @abstractmethod
    def backward(self, micro_batch: MicroBatch, version: int, first: bool = True) -> Sums:
        """Add one micro-batch's gradient."""

    @abstractmethod
    def _gradient(self, packs: Sequence[MicroBatch], version: int, first: bool) -> Outcome:
        """Of all these, clipped."""

    def _taken(self, outcome: Outcome, trains: bool) -> Outcome:
        """Step, or leave a bad step out. Where nothing trains on any rank there is no step: AdamW would take most of
        its last one again."""
        trouble = self.norms.trouble(outcome)
        if trouble or not trains:
            self._taker.zero()
        else:
            self._taker.step()
            self.norms.add(outcome.grad_norm)
        return replace(outcome, trouble=trouble)
