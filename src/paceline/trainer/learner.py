"""Trains one batch: gather it on every rank, prepare it once, then take K optimizer steps.

gather -> deal out to ranks and micro-batches -> critic's advantages -> log probabilities of the batch's start and the
reference -> minibatch by minibatch:
scales -> this rank's micro-batches backward -> gradients of all ranks -> clip -> step, or leave a bad step out

A batch that is still coming in (`StreamedBatch`) does not know a component's normaliser N. Its tokens are summed as if
N were 1, each component in a sum of its own; in the end

    gradient = sum_rl / N_rl + sum_ce / N_ce + sum_teacher_kl / N_teacher_kl

is what the whole batch at once would have given, whatever came first.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf, isfinite
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import (
    MicroBatch,
    Sample,
    Scales,
    collate,
    component_counts,
    first_fit_decreasing,
    pack,
    token_scales,
)
from paceline.data.packing import COMPONENTS, all_members, flatten_bins, restrict_bins
from paceline.data.sample import NO_SCORES, TOKEN_SCORE, TokenScores
from paceline.errors import TrainerError
from paceline.trainer.backend import DUMMY_PACK, Batch, PolicyBackend, collate_bins, score_samples, training
from paceline.trainer.checkpoint import strip_prefix
from paceline.trainer.critic import Critic
from paceline.trainer.loss import STAT_NAMES, TERMS, Loss, LossStats, TokenLosses, metrics
from paceline.trainer.reference import KLReference, subtract_kl
from paceline.trainer.terms import TrainedTokens, stack, to_host, trained_positions
from paceline.weights.update import Array

if TYPE_CHECKING:
    from paceline.trainer.backend import Optimizer

SCALE_OF = {"rl": "regulariser_scale", "ce": "ce_scale", "teacher_kl": "teacher_kl_scale"}
"""The scale that is not 0 on a component's tokens."""
ONE = np.ones((len(COMPONENTS), 2))


class StreamedBatch:
    """Takes samples as they come and runs them in whole micro-batches."""

    def __init__(self, c: config.TrainerConfig, optimizer: "Optimizer") -> None:
        self._config = c
        self._optimizer = optimizer
        self._waiting: list[tuple[int, Sample, Scales]] = []
        """Samples with their numbers, in the order in which they came."""
        self._count = 0
        self._gradients: dict[str, Mapping[str, Array]] = {}
        self.sums: list[LossStats] = []
        """Of the micro-batches that ran."""
        self.computed: list[ComputedTokens] = []
        """Of the micro-batches that ran, members by their numbers."""
        self.samples: list[Sample] = []
        """Of the micro-batches that ran and were not left out."""

    def add(
        self, samples: Sequence[Sample], budget: int, last: bool = False
    ) -> list[tuple[MicroBatch, list[Sample], list[int]]]:
        """The micro-batches to run now, with their samples and the numbers of these. The emptiest waits for what comes,
        unless these samples are the last."""
        # Now, while all of a rollout's samples are at hand: their lengths may count together.
        scales = token_scales(samples, self._config.normalise, self._config.fixed_length, ONE)
        self._waiting += zip(range(self._count, self._count + len(samples)), samples, scales, strict=True)
        self._count += len(samples)
        lengths = [len(sample) for _, sample, _ in self._waiting]
        bins = first_fit_decreasing(lengths, budget)
        emptiest = [] if last else min(bins, key=lambda members: sum(lengths[i] for i in members), default=[])
        waiting, self._waiting = self._waiting, [self._waiting[i] for i in sorted(emptiest)]
        full = [[waiting[i] for i in sorted(members)] for members in bins if members is not emptiest]
        parts = [tuple(map(list, zip(*part, strict=True))) for part in full]
        return [(pack(own, own_scales, budget)[0], own, numbers) for numbers, own, own_scales in parts]

    @contextmanager
    def sum_component(self, name: str) -> Generator[None]:
        """Gradients added to the optimizer inside belong to this component."""
        self._optimizer.add_gradients(self._gradients.pop(name, {}))
        yield
        self._gradients[name] = self._optimizer.take_gradients()

    def finish(self, totals: NDArray) -> NDArray:
        """Leave the batch's gradient with the optimizer, by the counts of all ranks; answers with the share that each
        of `loss.STAT_NAMES` has yet to be multiplied by."""
        shares = np.ones(len(STAT_NAMES))
        for name, (tokens, rollouts) in zip(COMPONENTS, totals, strict=True):
            share = 1 / max(1.0, float(tokens if self._config.normalise == "token" else rollouts))
            self._optimizer.add_gradients(self._gradients.pop(name, {}), share)
            shares[[STAT_NAMES.index(f"loss_{term}") for term in TERMS[name]]] = share
        return shares


KEPT = 32
"""Steps the median is of: enough to be calm, few enough to follow a run whose gradients shrink."""
WARM_UP = 8
"""Steps before anything is judged: a run's first gradients say little about the next."""


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """The trained tokens of a micro-batch that ran. They stay where they were computed until `scores` is called: a GPU
    need not be waited for."""

    members: Sequence[int]
    counts: NDArray
    """Of each member."""
    tokens: Array | None
    """`LossStats.tokens`."""

    @classmethod
    def of(cls, micro_batch: MicroBatch, sums: LossStats, members: Sequence[int] | None = None) -> "ComputedTokens":
        trained = np.zeros(len(micro_batch), int)
        trained[trained_positions(micro_batch)] = 1
        counts = np.add.reduceat(trained, np.cumsum(micro_batch.lengths) - micro_batch.lengths)
        return cls(micro_batch.members if members is None else members, counts, sums.tokens)

    def scores(self) -> TokenScores:
        """Of the members in which something trains."""
        if self.tokens is None:
            return NO_SCORES
        scores: NDArray = np.empty(int(self.counts.sum()), TOKEN_SCORE)
        trains = self.counts > 0
        for name, values in zip(TOKEN_SCORE.names or (), to_host(self.tokens), strict=True):
            scores[name] = values
        samples = np.stack([np.array(self.members)[trains], self.counts[trains]], 1).astype("<u4")
        return TokenScores(samples.tobytes(), scores.tobytes())


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One optimizer step."""

    sums: NDArray
    """Of all its tokens, in the order of `loss.STAT_NAMES`."""
    grad_norm: float
    micro_batches: int
    scores: TokenScores = NO_SCORES
    """Of its trained tokens."""
    trouble: str = ""
    """Why it was left out; empty if it was taken."""

    @property
    def is_finite(self) -> bool:
        return isfinite(self.grad_norm) and self.is_loss_finite

    @property
    def is_loss_finite(self) -> bool:
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
        if not outcome.is_finite:
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


class Learner:
    """A policy, and beside it whatever the settings ask for: a KL reference, a critic."""

    def __init__(self, c: config.TrainerConfig, policy: PolicyBackend, total_steps: int | None = None) -> None:
        self._config, self.policy = c, policy
        self.optimizer: Optimizer = policy.optimizer
        self._reference = KLReference(c.kl, policy.parameters) if c.kl is not None and c.kl.is_in_trainer else None
        self._critic = Critic(c, policy, total_steps) if c.critic is not None else None
        self._loss = Loss(c)
        self._norms = GradientNorms(c.spike, policy.sum_over_all_ranks)
        self._stream: StreamedBatch | None = None
        self.watch: Callable[[MicroBatch, TrainedTokens, TokenLosses], None] | None = None
        """Called for every micro-batch of a step with the losses of its tokens; `paceline replay` sets it."""

    def feed(self, samples: Sequence[Sample], version: int, whole: bool = False) -> int:
        """Run the micro-batches that samples of an unfinished batch fill, with `whole` also one that is not full.
        `learn` then gets only the other samples. Answers with how many of all that ran so far count."""
        self._stream = self._stream or StreamedBatch(self._config, self.optimizer)
        if samples:
            samples = self._prepare_local(samples).samples
            self._run_fed(self._stream, self._stream.add(samples, self.policy.budget, whole), version)
        return len(self._stream.samples)

    def learn(self, samples: Sequence[Sample], version: int) -> tuple[dict[str, float], str, TokenScores]:
        """Train one batch, sampled by `version` or earlier: its metrics, what was wrong with a step that was left out,
        if one was, and the scores of its tokens. What was fed before belongs to it."""
        rate, report, critic_steps = self.optimizer.schedule.lr, {}, []
        if self._stream is None:
            steps, report, critic_steps = self._learn_whole(samples, version)
        else:
            self.feed(samples, version)
            steps = [self._finish_fed(version)]
        if self._reference is not None:
            self._reference.follow(version + 1, self.optimizer)
        if steps:
            good = [step for step in steps if not step.trouble] or steps  # one NaN would spread to all
            report |= metrics(np.sum([step.sums for step in good], axis=0), len(good))
            report["grad_norm"] = fmean(step.grad_norm for step in good)
            report["micro_batches"] = float(sum(step.micro_batches for step in good))
            report["lr"] = rate
        troubles = [step.trouble for step in steps if step.trouble]
        if not all(np.isfinite(list(one.values())).all() for one in critic_steps):
            troubles.append("the critic's loss or gradient was not finite")
        return report, troubles[0] if troubles else "", TokenScores.joined([step.scores for step in steps])

    def one_per_micro_batch(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """Each sample in a micro-batch of its own, with its share of the whole batch's normalisers."""
        batch = self._prepare_local(samples)
        scales = dict(enumerate(token_scales(batch.samples, self._config.normalise, self._config.fixed_length)))
        return [collate([i], batch.samples, scales, batch.prox) for i in scales]

    def backward(self, micro_batch: MicroBatch, version: int, first: bool = True) -> LossStats:
        """Add one micro-batch's gradient."""

        def whole(tokens: TrainedTokens) -> tuple[dict[str, Array], LossStats]:
            loss, sums = self._loss(tokens, version, first)
            return {"loss": loss}, sums

        def watched(tokens: TrainedTokens) -> None:
            assert self.watch is not None
            self.watch(micro_batch, tokens, self._loss.per_token(tokens))

        return self.policy.backward(micro_batch, ["loss"], whole, on_tokens=watched if self.watch is not None else None)

    def _add(self, stream: StreamedBatch, micro_batch: MicroBatch, version: int) -> LossStats:
        """Add a micro-batch's gradient to a stream's sums, each component's to its own."""
        names = [name for name, scale in SCALE_OF.items() if getattr(micro_batch, scale).any()]

        def by_component(tokens: TrainedTokens) -> tuple[dict[str, Array], LossStats]:
            parts, sums = self._loss.parts(tokens, version)
            return {name: stack([parts[term] for term in TERMS[name] if term in parts]).sum() for name in names}, sums

        return self.policy.backward(micro_batch, names, by_component, stream.sum_component)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Array]:
        out = dict(self.optimizer.tensors())
        for prefix, part in (("reference", self._reference), ("critic", self._critic)):
            if part is not None:
                out |= {f"{prefix}/{name}": tensor for name, tensor in part.tensors().items()}
        return out

    def state(self) -> dict:
        return {
            "optimizer_steps": self.optimizer.schedule.steps,
            "loss_scale": self.optimizer.schedule.scale,
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
            self._reference.load(strip_prefix("reference/", tensors), state.get("base", ""))
        if self._critic is not None:
            self._critic.load(strip_prefix("critic/", tensors), state.get("critic", {}))

    # -- preparing a batch ------------------------------------------------------------------------------------------

    def _prepare_local(self, samples: Sequence[Sample]) -> Batch:
        """Samples that no other rank needs to know of."""
        return self._add_logprobs(self._add_advantages(Batch.single_rank(samples, self._config, self.policy.budget))[0])

    def _add_advantages(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Advantages for all, or a sentence on the sample that lacks them; and what the critic reports of the batch."""
        for sample in batch.samples:
            self._check(sample)
        return (batch, {}) if self._critic is None else self._critic.credit(batch)

    def _check(self, sample: Sample) -> None:
        distils = sample.teacher_kl_weights is not None and sample.teacher_kl_weights[sample.loss_mask].any()
        if distils and sample.teacher_logprobs is None:
            raise TrainerError(f"{sample.where}: tokens train with teacher_kl but carry no `teacher_logprobs`")
        if sample.advantages is not None or not sample.rl_token_weights.any():
            return
        if sample.rewards is None:
            raise TrainerError(f"{sample.where}: tokens train with rl but carry neither advantages nor rewards")
        if self._critic is None:
            raise TrainerError(
                f"{sample.where}: carries rewards and no advantages, which needs a critic to turn one into the "
                "other: write [trainer.critic] in the run file"
            )

    def _add_logprobs(self, batch: Batch) -> Batch:
        """With what the settings ask for: log probabilities at the batch's start, the reference's, and its KL in
        the advantages. Which samples need them is decided over all ranks, so that all run their passes or none does."""
        kl, samples = self._config.kl, list(batch.samples)
        shaping = kl is not None and kl.how == "advantage"

        def scores(chosen: set[int]) -> dict[int, NDArray]:
            """This rank's part of a pass over some samples of all ranks."""
            own = restrict_bins(batch.step_bins, chosen)[batch.rank]
            return score_samples(self.policy.forward.scores, batch.samples, own)

        need_prox: set[int] = set()
        if self._config.proximal:
            # The first step needs none: it is taken from the batch's start itself.
            later = batch.step_bins[0 if shaping else 1 :]
            need_prox = {i for cut in later for i in all_members(cut) if samples[i].rl_token_weights.any()}
        prox = scores(need_prox)
        lacking = {i for i, s in enumerate(samples) if s.kl_ref_logprobs is None and s.rl_token_weights.any()}
        if self._reference is not None and lacking:
            with self._reference.swapped_in():
                ref = scores(lacking)
            for i, stream in ref.items():
                samples[i] = samples[i].with_streams(kl_ref_logprobs=stream)
        if shaping and kl is not None:
            unscored = {i for i, s in enumerate(samples) if s.logprobs is None and i not in need_prox}
            given = {i: stream for i in batch.own if (stream := samples[i].logprobs) is not None}
            for i, policy in (given | scores(unscored) | prox).items():
                samples[i] = subtract_kl(samples[i], policy, kl)
        return replace(batch, samples=samples, prox=prox)

    # -- optimizer steps --------------------------------------------------------------------------------------------

    def _finish_fed(self, version: int) -> StepOutcome:
        """The step of a batch that was fed. A gradient that is not finite is computed once more from the whole."""
        assert self._stream is not None
        stream, self._stream = self._stream, None
        self._run_fed(stream, stream.add([], self.policy.budget, last=True), version)
        counts = component_counts(stream.samples)
        totals = self.policy.sum(counts.ravel()).reshape(counts.shape)
        outcome = self._outcome(stream.sums, stream.computed, stream.finish(totals))
        if outcome.is_finite:
            return self._take_step(outcome, bool(totals.any()))
        self.optimizer.zero()
        again = self._step(self.policy.gather(stream.samples), 0, version)
        assert again is not None  # what is fed has one step
        return again

    def _run_fed(
        self, stream: StreamedBatch, packs: Sequence[tuple[MicroBatch, list[Sample], list[int]]], version: int
    ) -> None:
        """Add to the sums of a batch that is still being gathered."""
        by_micro_batch = self._config.clip_skip_scope == "micro_batch"
        with training(self.policy.net):
            for micro_batch, samples, numbers in packs:
                sums = self._add(stream, micro_batch, version)
                stream.sums.append(sums)
                stream.computed.append(ComputedTokens.of(micro_batch, sums, numbers))
                if not (by_micro_batch and float(sums.values.get("num_skipped", 0))):
                    stream.samples += samples

    def _learn_whole(
        self, samples: Sequence[Sample], version: int
    ) -> tuple[list[StepOutcome], dict[str, float], list[dict[str, float]]]:
        """K steps on a whole batch: how they went, and the critic's metrics of the batch and of each of its steps."""
        measures = self._config.micro_batch_tokens == "auto"
        if measures and self._critic is not None and self._critic.lacking_advantages(samples):
            self._critic.make()  # before the memory left for a micro-batch is measured
        batch, report = self._add_advantages(self.policy.gather(samples))
        critic = self._critic if batch.valued else None
        waits = critic is not None and critic.is_warming_up
        batch = batch if waits else self._add_logprobs(batch)
        steps, critic_steps = [], []
        for number in range(self._config.minibatches):
            if not waits and (outcome := self._step(batch, number, version)):
                steps.append(outcome)
            if critic is not None and (taken := self._critic_step(critic, batch, number)):
                critic_steps.append(taken)
        if critic is not None:
            critic.batches += 1
            report |= {name: fmean(one[name] for one in critic_steps) for name in critic_steps[0]}
        return steps, report, critic_steps

    def _step(self, batch: Batch, number: int, version: int) -> StepOutcome | None:
        """One optimizer step on all ranks' samples; None for one of several that has none."""
        cut = batch.step_bins[number]
        members, bins = all_members(cut), cut[batch.rank]
        if not members and self._config.minibatches > 1:
            return None
        scales = self._scales(batch, members, flatten_bins(bins))
        packs = collate_bins(batch.samples, scales, bins, batch.prox) or [DUMMY_PACK]
        trains = bool(component_counts([batch.samples[i] for i in members]).any())
        outcome = self._gradient(packs, version, number == 0)
        while not outcome.is_finite and self.optimizer.schedule.lower_scale(outcome.is_loss_finite):
            self.optimizer.zero()
            outcome = self._gradient(packs, version, number == 0)
        return self._take_step(outcome, trains)

    def _scales(self, batch: Batch, members: Sequence[int], own: Sequence[int]) -> dict[int, Scales]:
        """The scales of `own` samples in an optimizer step on all `members`."""
        step, place = [batch.samples[i] for i in members], {index: at for at, index in enumerate(members)}
        places, c = [place[i] for i in own], self._config
        return dict(zip(own, token_scales(step, c.normalise, c.fixed_length, own=places), strict=True))

    def _gradient(self, packs: Sequence[MicroBatch], version: int, first: bool) -> StepOutcome:
        """Of all these, clipped."""
        with training(self.policy.net):
            sums = [self.backward(micro_batch, version, first) for micro_batch in packs]
        return self._outcome(sums, [ComputedTokens.of(*one) for one in zip(packs, sums, strict=True)])

    def _outcome(
        self, sums: Sequence[LossStats], tokens: Sequence[ComputedTokens], shares: NDArray | float = 1.0
    ) -> StepOutcome:
        """The sums of micro-batches that ran, times `shares` (those of a streamed batch were divided by a guess of its
        normalisers), and the clipped norm of their gradient. The norm is computed first, so that a GPU is waited for
        once. A micro-batch in which nothing trains may have no sums."""
        norm, computed = self.policy.clip(), [one for one in sums if one.values]
        totals = self.policy.sum(to_host(LossStats.total(computed)) if computed else np.zeros(len(STAT_NAMES)))
        return StepOutcome(
            totals * shares, float(norm), len(sums), TokenScores.joined([one.scores() for one in tokens])
        )

    def _take_step(self, outcome: StepOutcome, trains: bool) -> StepOutcome:
        """Step, or leave a bad step out. Where nothing trains on any rank there is no step: AdamW would take most of
        its last one again."""
        trouble = self._norms.trouble(outcome)
        if trouble or not trains:
            self.optimizer.zero()
        else:
            self.optimizer.step()
            self._norms.add(outcome.grad_norm)
        return replace(outcome, trouble=trouble)

    def _critic_step(self, critic: Critic, batch: Batch, number: int) -> dict[str, float] | None:
        """The critic's step beside one of the policy's; None where it has no targets."""
        cut = restrict_bins([batch.step_bins[number]], batch.valued)
        members, bins = all_members(cut), cut[batch.rank]
        if not members:
            return None
        packs = collate_bins(batch.samples, self._scales(batch, members, flatten_bins(bins)), bins, {})
        return critic.update(packs, batch.value_targets)
