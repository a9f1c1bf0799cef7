"""One optimizer step of the policy: a gradient, and a verdict on it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import MicroBatch, count
from paceline.model.weights import Array
from paceline.trainer.loss import NAMES, Judged, Loss, Sums
from paceline.trainer.norms import Norms, Outcome
from paceline.trainer.stream import Stream
from paceline.trainer.tokens import Tokens

STREAMS = ("versions", "advantages", "ref_logprobs", "base_logprobs", "prox_logprobs", "kv_kept")
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

    def __init__(
        self, c: config.Trainer, model: Any, optimizer: Optimizer, summed: Callable[[float], float] = float
    ) -> None:
        self._config, self._model, self._taker = c, model, optimizer
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

    def feed(self, stream: Stream, packs: Sequence[MicroBatch], version: int) -> None:
        """Add to the sums of a batch that is still being gathered."""
        with self._training():
            stream.sums += [self._add(stream, micro_batch, version) for micro_batch in packs]

    def finish(self, stream: Stream) -> Outcome | None:
        """The step of a batch that was fed; None where its gradient is not finite, and gone."""
        counts = count(stream.samples)
        totals = self._over_ranks(counts.ravel()).reshape(counts.shape)
        outcome = self._outcome(stream.sums, stream.finish(totals))
        if outcome.finite:
            return self._taken(outcome, bool(totals.any()))
        self._taker.zero()
        return None

    @abstractmethod
    def backward(self, micro_batch: MicroBatch, version: int, first: bool = True) -> Sums:
        """Add one micro-batch's gradient."""

    @abstractmethod
    def _add(self, stream: Stream, micro_batch: MicroBatch, version: int) -> Sums:
        """Add a micro-batch's gradient to a stream's sums, each component's to its own."""

    @abstractmethod
    def _clip(self) -> Any:
        """Sum the gradient that is there over the ranks and clip it; answers with the norm it had."""

    @contextmanager
    def _training(self) -> Generator[None]:
        """The model drops out inside what it is told to."""
        self._model.train()
        try:
            yield
        finally:
            self._model.eval()

    def _gradient(self, packs: Sequence[MicroBatch], version: int, first: bool) -> Outcome:
        """Of all these, clipped."""
        with self._training():
            sums = [self.backward(micro_batch, version, first) for micro_batch in packs]
        return self._outcome(sums)

    def _outcome(self, sums: Sequence[Sums], shares: NDArray | float = 1.0) -> Outcome:
        """Of micro-batches that ran, their sums by shares still to be taken. A GPU is not waited for before its norm is
        on its way. A micro-batch in which nothing trains may have no sums."""
        norm, held = self._clip(), [one for one in sums if one.values]
        totals = self._over_ranks(Sums.total(held) if held else np.zeros(len(NAMES)))
        return Outcome(totals * shares, float(norm), len(sums))

    @abstractmethod
    def _over_ranks(self, values: Array | NDArray) -> NDArray:
        """Summed, as float64 numbers of the host."""

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
