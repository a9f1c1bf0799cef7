"""Trains one batch: gather it on every rank, prepare it once, then take K optimizer steps.

together -> cut -> prepare -> minibatch by minibatch:
scales -> this rank's micro-batches backward -> gradients of all ranks -> clip -> step, or leave a bad step out
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample, count, fold, lay
from paceline.data.balance import everyone, held
from paceline.trainer.batch import BLANK_PACK, Batch, TrainedTokens, packed, scales_of
from paceline.trainer.checkpoint import under
from paceline.trainer.critic import Critic
from paceline.trainer.loss import NAMES, Loss, LossStats, TokenLosses, metrics
from paceline.trainer.optimizer import MasterOptimizer
from paceline.trainer.preparing import Preparation, Prepared
from paceline.trainer.stepping import Norms, StepOutcome, Stream
from paceline.weights.update import Array, Canary


@dataclass(frozen=True, slots=True)
class Steps:
    """The outcome of a batch."""

    outcomes: list[StepOutcome]
    report: dict[str, float] = field(default_factory=dict)
    """The critic's metrics of the batch."""
    lessons: list[dict[str, float]] = field(default_factory=list)
    """Its metrics of each of its own steps."""


class Learner(ABC):
    """A policy with its optimizer, and beside them whatever the settings ask for: a KL reference, a critic, ranks.
    A subclass chooses the library that computes."""

    def __init__(
        self,
        c: config.TrainerConfig,
        model: Any,
        forward: Any,
        optimizer: MasterOptimizer,
        reference: Any | None,
        critic: Critic | None,
        summed: Callable[[float], float] = float,
    ) -> None:
        """`summed` adds a number up over the ranks."""
        self._config, self._net, self.forward, self.optimizer = c, model, forward, optimizer
        self._reference, self._critic = reference, critic
        self._preparation = Preparation(c, forward, reference, critic)
        self._loss = Loss(c)
        self._norms = Norms(c.spike, summed)
        self._stream: Stream | None = None
        self.watch: Callable[[MicroBatch, TrainedTokens, TokenLosses], None] | None = None
        """Called for every micro-batch of a step with the losses of its tokens; `paceline replay` sets it."""

    def feed(self, samples: Sequence[Sample], version: int) -> None:
        """Samples of a batch that is still being gathered: what micro-batches they fill run now. `learn` then gets only
        the others."""
        self._stream = self._stream or Stream(self._config, self.optimizer)
        if not samples:
            return
        work = self._alone(samples)
        self._run_fed(self._stream, self._stream.add(work.batch.samples, self._budget), version)

    def learn(self, samples: Sequence[Sample], version: int) -> tuple[dict[str, float], str]:
        """Train one batch, sampled by `version` or earlier: its metrics, and what was wrong with a step that was left
        out, if one was. What was fed before belongs to it."""
        rate = self.optimizer.lr
        taken = self._steps(samples, version)
        if self._reference is not None:
            self._reference.follow(version + 1, self.optimizer)
        steps, report = taken.outcomes, dict(taken.report)
        if steps:
            good = [step for step in steps if not step.trouble] or steps  # one NaN would spread to all
            report |= metrics(np.sum([step.sums for step in good], axis=0), len(good))
            report["grad_norm"] = fmean(step.grad_norm for step in good)
            report["micro_batches"] = float(sum(step.micro_batches for step in good))
            report["lr"] = rate
        troubles = [step.trouble for step in steps if step.trouble]
        if not all(np.isfinite(list(one.values())).all() for one in taken.lessons):
            troubles.append("the critic's loss or gradient was not finite")
        return report, troubles[0] if troubles else ""

    def alone(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """Each sample in a micro-batch of its own, with its share of the whole batch's normalisers."""
        work = self._alone(samples)
        scales = dict(enumerate(fold(work.batch.samples, self._config.normalise, self._config.fixed_length)))
        return [lay([i], work.batch.samples, scales, work.prox) for i in scales]

    # -- what a library does ------------------------------------------------------------------------------------------

    @abstractmethod
    def backward(self, micro_batch: MicroBatch, version: int, first: bool = True) -> LossStats:
        """Add one micro-batch's gradient."""

    @abstractmethod
    def _add(self, stream: Stream, micro_batch: MicroBatch, version: int) -> LossStats:
        """Add a micro-batch's gradient to a stream's sums, each component's to its own."""

    @abstractmethod
    def _clip(self) -> Any:
        """Sum the gradient that is there over the ranks and clip it; answers with the norm it had."""

    @abstractmethod
    def _over_ranks(self, values: Array | NDArray) -> NDArray:
        """Summed, as float64 numbers of the host."""

    @property
    @abstractmethod
    def _budget(self) -> int:
        """Tokens of a micro-batch."""

    @abstractmethod
    def _together(self, samples: Sequence[Sample]) -> Batch:
        """All ranks' samples, and the same cut of them on every rank."""

    @abstractmethod
    def canary(self) -> Canary:
        """Log probabilities of a few fixed tokens under the current weights."""

    @abstractmethod
    def peak_bytes(self) -> float:
        """The most memory this process has needed so far."""

    @property
    def rank(self) -> int:
        return 0

    def total(self, value: float) -> float:
        """A number, summed over the ranks."""
        return value

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Array]:
        out = self.optimizer.tensors()
        for prefix, part in (("reference", self._reference), ("critic", self._critic)):
            if part is not None:
                out |= {f"{prefix}/{name}": tensor for name, tensor in part.tensors().items()}
        return out

    def state(self) -> dict:
        return {
            "optimizer_steps": self.optimizer.steps,
            "loss_scale": self.optimizer.scale,
            "base": "" if self._reference is None else self._reference.base_fingerprint(),
            "critic": {} if self._critic is None else self._critic.state(),
            "grad_norms": self._norms.state(),
        }

    def load(self, tensors: Mapping[str, Array], state: Mapping) -> None:
        self._stream = None  # what was fed belongs to a batch that is no more
        self.optimizer.zero()
        self._norms.load(state.get("grad_norms", ()))
        self.optimizer.load(tensors, state["optimizer_steps"], state.get("loss_scale"))
        if self._reference is not None:
            self._reference.load(under("reference/", tensors), state.get("base", ""))
        if self._critic is not None:
            self._critic.load(under("critic/", tensors), state.get("critic", {}))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _alone(self, samples: Sequence[Sample]) -> Prepared:
        """Samples that no other rank needs to know of."""
        batch = Batch.alone(samples, self._config, self._budget)
        return self._preparation.scored(self._preparation.credit(batch)[0])

    def _steps(self, samples: Sequence[Sample], version: int) -> Steps:
        """Train what is left of a batch: all of it, or what was not fed before."""
        if self._stream is None:
            return self._whole(samples, version)
        self.feed(samples, version)
        return Steps([self._finish(version)])

    def _finish(self, version: int) -> StepOutcome:
        """The step of a batch that was fed. A gradient that is not finite is computed once more from the whole."""
        assert self._stream is not None
        stream, self._stream = self._stream, None
        self._run_fed(stream, stream.rest(self._budget), version)
        counts = count(stream.samples)
        totals = self._over_ranks(counts.ravel()).reshape(counts.shape)
        outcome = self._outcome(stream.sums, stream.finish(totals))
        if outcome.finite:
            return self._taken(outcome, bool(totals.any()))
        self.optimizer.zero()
        again = self._step(Prepared(self._together(stream.samples), {}, {}), 0, version)
        assert again is not None  # what is fed has one step
        return again

    def _run_fed(self, stream: Stream, packs: Sequence[MicroBatch], version: int) -> None:
        """Add to the sums of a batch that is still being gathered."""
        with self._training():
            stream.sums += [self._add(stream, micro_batch, version) for micro_batch in packs]

    def _whole(self, samples: Sequence[Sample], version: int) -> Steps:
        """K steps on a whole batch: how they went, and what the critic reports of the batch and of each step."""
        work, report = self._preparation.credit(self._together(samples))
        critic = self._critic if work.taught else None
        waits = critic is not None and critic.warming_up
        work = work if waits else self._preparation.scored(work)
        taken = Steps([], report)
        for number in range(self._config.minibatches):
            if not waits and (outcome := self._step(work, number, version)):
                taken.outcomes.append(outcome)
            if critic is not None and (lesson := self._teach(critic, work, number)):
                taken.lessons.append(lesson)
        if critic is not None:
            critic.batches += 1
            report |= {name: fmean(one[name] for one in taken.lessons) for name in taken.lessons[0]}
        return taken

    def _step(self, work: Prepared, number: int, version: int) -> StepOutcome | None:
        """One optimizer step on all ranks' samples; None for one of several that has none."""
        batch, cut = work.batch, work.batch.cuts[number]
        members, bins = everyone(cut), cut[batch.rank]
        if not members and self._config.minibatches > 1:
            return None
        scales = scales_of(batch.samples, members, held(bins), self._config)
        packs = packed(batch.samples, scales, bins, work.prox) or [BLANK_PACK]
        trains = bool(count([batch.samples[i] for i in members]).any())
        outcome = self._gradient(packs, version, number == 0)
        while not outcome.finite and self.optimizer.retreat(outcome.sound):
            outcome = self._gradient(packs, version, number == 0)
        return self._taken(outcome, trains)

    @contextmanager
    def _training(self) -> Generator[None]:
        """The model drops out inside what it is told to."""
        self._net.train()
        try:
            yield
        finally:
            self._net.eval()

    def _gradient(self, packs: Sequence[MicroBatch], version: int, first: bool) -> StepOutcome:
        """Of all these, clipped."""
        with self._training():
            sums = [self.backward(micro_batch, version, first) for micro_batch in packs]
        return self._outcome(sums)

    def _outcome(self, sums: Sequence[LossStats], shares: NDArray | float = 1.0) -> StepOutcome:
        """Of micro-batches that ran, their sums by shares still to be taken. A GPU is not waited for before its norm is
        on its way. A micro-batch in which nothing trains may have no sums."""
        norm, held = self._clip(), [one for one in sums if one.values]
        totals = self._over_ranks(LossStats.total(held) if held else np.zeros(len(NAMES)))
        return StepOutcome(totals * shares, float(norm), len(sums))

    def _taken(self, outcome: StepOutcome, trains: bool) -> StepOutcome:
        """Step, or leave a bad step out. Where nothing trains on any rank there is no step: AdamW would take most of
        its last one again."""
        trouble = self._norms.trouble(outcome)
        if trouble or not trains:
            self.optimizer.zero()
        else:
            self.optimizer.step()
            self._norms.add(outcome.grad_norm)
        return replace(outcome, trouble=trouble)

    def _teach(self, critic: Critic, work: Prepared, number: int) -> dict[str, float] | None:
        """The critic's step beside one of the policy's; None where nothing in it teaches."""
        cut = work.batch.cuts[number]
        members = [i for i in everyone(cut) if i in work.taught]
        own = [i for i in held(cut[work.batch.rank]) if i in work.lessons]
        if not members:
            return None
        scales = scales_of(work.batch.samples, members, own, self._config)
        return critic.update([work.lessons[i] for i in own], [scales[i] for i in own])
