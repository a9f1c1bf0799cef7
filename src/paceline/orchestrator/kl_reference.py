"""Computes the KL reference outside the trainer: at an endpoint, on workers of the run, or on its engines.

Samples get its log probabilities as the stream `kl_ref_logprobs`, before they train. With `trainer.kl.how = "reward"`
that happens when a group is sampled, since every algorithm compares rewards that hold the penalty already.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from paceline.algorithms.base import KL_PENALTY, AlgorithmContext
from paceline.algorithms.reference_scorer import ReferenceScorer, WantedScores
from paceline.clients import Pool
from paceline.clients.frozen import FrozenPool
from paceline.config import RunConfig
from paceline.config.model import ModelRef
from paceline.config.trainer import KLConfig
from paceline.data import Sample
from paceline.orchestrator.checkpoint import CheckpointError
from paceline.rollout import Group, Rollout, SamplingClient
from paceline.trainer.terms import KL_TERMS
from paceline.weights.update import BASE_MODEL, WeightUpdate
from paceline.weights.weight_store import StoredUpdate, read_update, save_update

SNAPSHOT_FILE = "kl-reference-{}.safetensors"
"""The snapshot in a checkpoint, by its version."""


def wanted_scores(kl: KLConfig) -> WantedScores:
    """Scores of what trains with rl. What a frozen model sampled has no KL that the reward could lose."""

    def is_lacking(sample: Sample) -> bool:
        if sample.kl_ref_logprobs is not None or (kl.how == "reward" and sample.logprobs is None):
            return False
        return bool(sample.rl_token_weights.any())

    return WantedScores("kl_ref_logprobs", is_lacking, "reference_failed")


def token_penalty(kl: KLConfig, sample: Sample) -> NDArray:
    """What each token costs of the reward, in float64: coef times the estimator between the sampler and the reference.
    Nothing where the policy did not sample."""
    if sample.logprobs is None or sample.kl_ref_logprobs is None:
        return np.zeros(len(sample))
    sampler, reference = sample.logprobs.astype(np.float64), sample.kl_ref_logprobs.astype(np.float64)
    return np.where(sample.loss_mask, kl.coef * KL_TERMS[kl.kind](sampler, reference), 0.0)


def subtract_kl_penalty(rollout: Rollout, kl: KLConfig) -> None:
    """Take the sum over its sampled tokens from the rollout's reward. What it took is a metric of the rollout."""
    penalty = float(sum(token_penalty(kl, sample).sum() for sample in rollout.samples))
    rollout.metrics = rollout.metrics | {KL_PENALTY: penalty}
    rollout.reward = (rollout.reward or 0.0) - penalty


class KLReferenceModel:
    """The reference of a run: scores samples, and follows the policy where it is a snapshot of it."""

    def __init__(self, kl: KLConfig, scorer: ReferenceScorer, workers: Pool | None = None) -> None:
        self._kl, self._scorer = kl, scorer
        self._workers = workers if kl.reference == "snapshot" else None
        self._snapshot: WeightUpdate | None = None
        self._stored: StoredUpdate | None = None
        """The snapshot with its fingerprint, once a checkpoint needed it."""

    @classmethod
    async def connect(
        cls,
        config: RunConfig,
        client: SamplingClient,
        attach: Callable[[ModelRef], Awaitable[FrozenPool]],
        workers: Pool | None,
    ) -> "KLReferenceModel | None":
        """The reference that the run file asks for; None where there is none, or the trainer computes it."""
        kl = config.trainer.kl
        if kl is None or kl.is_in_trainer:
            return None
        wanted, handling = wanted_scores(kl), config.failures.handling("teacher")
        if isinstance(kl.reference, ModelRef):
            context = AlgorithmContext("", (), client, attach, handling)
            return cls(kl, await ReferenceScorer.connect(kl.reference, context, wanted, "trainer.kl.reference"))
        if workers is not None:
            return cls(kl, ReferenceScorer(workers, "the workers of the KL reference", handling, wanted), workers)
        return cls(kl, ReferenceScorer(client.pool, "the engine's base", handling, wanted, BASE_MODEL))

    async def score_batch(self, groups: Sequence[Group]) -> Counter[str]:
        """Score what is about to train and was not scored; answers with how many samples were lost, by reason."""
        return await self._scorer.add_logprobs(groups)

    async def score_group(self, group: Group) -> Group:
        """Score a group before it is credited, where the reward holds the penalty. A rollout of which a sample could
        not be scored has failed, as [breaker] counts: its reward cannot be known."""
        if self._kl.how != "reward":
            return group
        counts = [len(rollout.samples) for rollout in group.rollouts]
        if not await self._scorer.add_logprobs([group], whole_batch=False):
            return group
        good, failed = [], list(group.failed)
        for rollout, count in zip(group.rollouts, counts, strict=True):
            if len(rollout.samples) == count:
                good.append(rollout)
            else:
                cause = f"{group.ticket.env}: {self._scorer.name} gave no KL for the reward: {self._scorer.cause}"
                failed.append(replace(rollout, error=cause, samples=[]))
        return replace(group, rollouts=good, failed=failed)

    async def take_if_due(self, update: WeightUpdate) -> None:
        """Take a published version where a snapshot is due."""
        if self._workers is None or (self._snapshot is not None and update.version % self._kl.every):
            return
        await self._workers.load_weights(update)
        self._snapshot, self._stored = replace(update, delta=None), None

    def save(self, folder: Path) -> None:
        if self._snapshot is None:
            return
        self._stored = self._stored or (self._snapshot, self._snapshot.expected or self._snapshot.fingerprint())
        save_update(self._stored, folder / SNAPSHOT_FILE.format(self._snapshot.version))

    async def load(self, folder: Path) -> None:
        """Back to a checkpoint's snapshot; without one it is taken from the next version that is published."""
        self._snapshot = self._stored = None
        if self._workers is None:
            return
        for path in sorted(folder.glob(SNAPSHOT_FILE.format("*"))):
            try:
                stored = await asyncio.to_thread(read_update, path, int(path.stem.rpartition("-")[2]))
            except (OSError, SafetensorError, ValueError) as error:
                raise CheckpointError(f"{path}, the snapshot of the KL reference, cannot be read: {error}") from error
            await self._workers.load_weights(stored[0])
            self._snapshot, self._stored = stored[0], stored
