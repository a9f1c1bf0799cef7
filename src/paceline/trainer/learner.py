"""Trains one batch: gather it on every rank, prepare it once, then take K optimizer steps.

together -> cut -> prepare -> minibatch by minibatch:
scales -> this rank's micro-batches backward -> gradients of all ranks -> clip -> step
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample, count, fold, lay
from paceline.data.balance import everyone, held
from paceline.trainer.batch import BLANK_PACK, Batch, packed, scales_of
from paceline.trainer.critic import Critic
from paceline.trainer.loss import metrics
from paceline.trainer.preparing import Preparation, Prepared
from paceline.trainer.stepping import StepOutcome, Stream
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

    optimizer: Any
    stepper: Any
    """A `Stepper`, with what else its library needs."""
    _preparation: Preparation
    _reference: Any | None = None
    _critic: Critic | None = None

    def __init__(self, c: config.TrainerConfig) -> None:
        self._config = c
        self._stream: Stream | None = None

    def feed(self, samples: Sequence[Sample], version: int) -> None:
        """Samples of a batch that is still being gathered: what micro-batches they fill run now. `learn` then gets only
        the others."""
        self._stream = self._stream or Stream(self._config, self.optimizer)
        if not samples:
            return
        work = self._alone(samples)
        self.stepper.feed(self._stream, self._stream.add(work.batch.samples, self._budget), version)

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
            "grad_norms": self.stepper.norms.state(),
        }

    def load(self, tensors: Mapping[str, Array], state: Mapping) -> None:
        self._stream = None  # what was fed belongs to a batch that is no more
        self.optimizer.zero()
        self.stepper.norms.load(state.get("grad_norms", ()))
        self.optimizer.load(tensors, state["optimizer_steps"], state.get("loss_scale"))
        if self._reference is not None:
            self._reference.load(_under("reference/", tensors), state.get("base", ""))
        if self._critic is not None:
            self._critic.load(_under("critic/", tensors), state.get("critic", {}))

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _budget(self) -> int:
        """Tokens of a micro-batch."""

    @abstractmethod
    def _together(self, samples: Sequence[Sample]) -> Batch:
        """All ranks' samples, and the same cut of them on every rank."""

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
        self.stepper.feed(stream, stream.rest(self._budget), version)
        if outcome := self.stepper.finish(stream):
            return outcome
        again = self._step(Prepared(self._together(stream.samples), {}, {}), 0, version)
        assert again is not None  # what is fed has one step
        return again

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
        return self.stepper.step(packs, version, number == 0, trains)

    def _teach(self, critic: Critic, work: Prepared, number: int) -> dict[str, float] | None:
        """The critic's step beside one of the policy's; None where nothing in it teaches."""
        cut = work.batch.cuts[number]
        members = [i for i in everyone(cut) if i in work.taught]
        own = [i for i in held(cut[work.batch.rank]) if i in work.lessons]
        if not members:
            return None
        scales = scales_of(work.batch.samples, members, own, self._config)
        return critic.update([work.lessons[i] for i in own], [scales[i] for i in own])


def _under(prefix: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
