"""Prepares a batch for its first step: log probabilities, references, shaped advantages."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample, fold
from paceline.data.balance import Bins, everyone, held, only
from paceline.trainer.base import TrainerError
from paceline.trainer.batch import BLANK_PACK, Batch, packed
from paceline.trainer.critic import Critic, Lesson


class Scoring(Protocol):
    """A model's forward pass."""

    def scores(self, micro_batch: MicroBatch) -> NDArray:
        """Log probabilities of the sampled tokens at their temperatures, in float32."""
        ...


def score(forward: Scoring, samples: Sequence[Sample], bins: Bins) -> dict[int, NDArray]:
    """Log probabilities of the sampled tokens of each sample in `bins` at their temperatures; 0.0 elsewhere. An empty
    bin is a pass too: other ranks may wait for it."""
    scores: dict[int, NDArray] = {}
    own = held(bins)
    scales = dict(zip(own, fold([samples[i] for i in own]), strict=True))
    for micro_batch in packed(samples, scales, bins, {}):
        stream = np.zeros(len(micro_batch), np.float32)
        stream[micro_batch.loss_mask] = forward.scores(micro_batch)
        if micro_batch is not BLANK_PACK:
            parts = np.split(stream, np.cumsum(micro_batch.lengths)[:-1])
            scores |= zip(micro_batch.members, parts, strict=True)
    return scores


def shaped(samples: Sequence[Sample], policy: Sequence[NDArray], c: config.KLConfig) -> list[Sample]:
    """K1 shaping: from each sample's advantages, coef times the mean over its sampled tokens of log pi - log ref,
    clipped to +-kl_max. The policy here is what it was when the batch began, so nothing flows back through it."""
    out = []
    for sample, pi in zip(samples, policy, strict=True):
        mask, base = sample.loss_mask, sample.base_logprobs
        if sample.advantages is None or base is None or not mask.any():
            out.append(sample)
            continue
        k1 = float(np.mean(pi[mask].astype(np.float64) - base[mask]))
        penalty = np.float32(c.coef * np.clip(k1, -c.kl_max, c.kl_max))
        out.append(sample.with_streams(advantages=sample.advantages - penalty * mask))
    return out


def check_base(saved: str, now: str) -> None:
    """Refuse a base that is not the one a checkpoint was held near; one written without a reference names none."""
    if saved and saved != now:
        raise TrainerError(
            "the KL reference is the model this run started from, but model.name now holds other weights: "
            "put the first ones back, or choose another trainer.kl.reference"
        )


class Stand(Protocol):
    """A KL reference that can take the policy's place."""

    def in_place(self) -> AbstractContextManager: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch with all that its optimizer steps aim at; streams are filled in for this rank's own samples."""

    batch: Batch
    prox: dict[int, NDArray]
    """Log probabilities at the batch's start, where a step later than the first needs them, by sample."""
    lessons: dict[int, Lesson]
    """The critic's targets, by sample."""
    taught: frozenset[int] = frozenset()
    """All samples it learns from, on whichever rank."""


class Preparation:
    """A policy's forward pass, with the reference and the critic if the settings ask for them."""

    def __init__(
        self, c: config.TrainerConfig, forward: Scoring, reference: Stand | None, critic: Critic | None
    ) -> None:
        self._config, self._forward, self._reference, self._critic = c, forward, reference, critic

    def credit(self, batch: Batch) -> tuple[Prepared, dict[str, float]]:
        """Advantages for all, or a sentence on the sample that lacks them; and what the critic reports of the batch."""
        for sample in batch.samples:
            self._check(sample)
        if self._critic is None:
            return Prepared(batch, {}, {}), {}
        taught = frozenset(self._critic.pupils(batch.samples))
        samples, lessons, report = self._critic.credit(batch.samples, batch.own)
        return Prepared(replace(batch, samples=samples), {}, lessons, taught), report

    def scored(self, work: Prepared) -> Prepared:
        """With what the settings ask for: scores at the batch's start, the reference's, and its pull."""
        batch, kl = work.batch, self._config.kl
        samples = list(batch.samples)
        shaping = kl is not None and kl.how == "advantage"
        started, lacking, frozen = self._unscored(batch, shaping)
        prox = self._scores(batch, started)
        if self._reference is not None and lacking:
            with self._reference.in_place():
                scores = self._scores(batch, lacking)
            for i, stream in scores.items():
                samples[i] = samples[i].with_streams(base_logprobs=stream)
        if shaping and kl is not None:
            given = {i: stream for i in batch.own if (stream := samples[i].logprobs) is not None}
            policy = given | self._scores(batch, frozen) | prox
            own = shaped([samples[i] for i in policy], list(policy.values()), kl)
            for i, sample in zip(policy, own, strict=True):
                samples[i] = sample
        return replace(work, batch=replace(batch, samples=samples), prox=prox)

    def _check(self, sample: Sample) -> None:
        pulled = sample.ref_kl_weights is not None and sample.ref_kl_weights[sample.loss_mask].any()
        if pulled and sample.ref_logprobs is None:
            raise TrainerError(f"{sample.where}: tokens train with ref_kl but carry no `ref_logprobs`")
        if sample.advantages is not None or not sample.rl.any():
            return
        if sample.rewards is None:
            raise TrainerError(f"{sample.where}: tokens train with rl but carry neither advantages nor rewards")
        if self._critic is None:
            raise TrainerError(
                f"{sample.where}: carries rewards and no advantages, which needs a critic to turn one into the "
                "other: write [trainer.critic] in the run file"
            )

    def _unscored(self, batch: Batch, shaping: bool) -> tuple[set[int], set[int], set[int]]:
        """The samples that need scores: at the batch's start, by the reference, and by the policy for its KL shaping
        where the sampler gave none. Of all ranks, so that all run their passes or none does."""
        samples, started = batch.samples, set()
        if self._config.proximal is not None:
            # The first step needs none: it is taken from the batch's start itself.
            later = batch.cuts[0 if shaping else 1 :]
            started = {i for cut in later for i in everyone(cut) if samples[i].rl.any()}
        held = self._reference is not None
        lacking = {i for i, s in enumerate(samples) if held and s.base_logprobs is None and s.rl.any()}
        frozen = {i for i, s in enumerate(samples) if shaping and s.logprobs is None and i not in started}
        return started, lacking, frozen

    def _scores(self, batch: Batch, chosen: set[int]) -> dict[int, NDArray]:
        """This rank's part of a pass over some samples of all ranks."""
        return score(self._forward, batch.samples, only(batch.cuts, chosen)[batch.rank])
