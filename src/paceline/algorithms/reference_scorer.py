"""Asks a reference model for the log probabilities of sampled tokens: a teacher's, or the KL reference's."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

import numpy as np

from paceline.algorithms.base import AlgorithmContext, AlgorithmError
from paceline.clients import Pool
from paceline.clients.frozen import FrozenPool
from paceline.config.filters import DEFAULT_HANDLING, FailureHandling
from paceline.config.model import PolicyOrModel
from paceline.data import Sample
from paceline.errors import EngineError, RequestError
from paceline.rollout import Group, Rollout
from paceline.util.deadlines import gather_or_cancel

SECONDS = 120.0
"""How long one score may take, and how long a reference that is gone is waited for in one batch."""
MAX_CONCURRENT_SCORES = 32
"""Scores asked of the policy itself at once; a frozen endpoint has a limit of its own."""
PROGRESS_SECONDS = 30.0
MAX_EMPTY_BATCHES = 3
"""Batches in a row in which the reference scored nothing at all before the run stops."""
log = logging.getLogger(__name__)


class ReferencePrompt(NamedTuple):
    """The reference's prompt before the sampled tokens: `head` stands in place of a sample's first `cut` tokens."""

    head: Sequence[int] = ()
    cut: int = 0


Context = Callable[[Rollout, Sample], ReferencePrompt]


class WantedScores(NamedTuple):
    """Which samples a reference scores, and the stream that its log probabilities become."""

    stream: Literal["teacher_logprobs", "kl_ref_logprobs"]
    is_lacking: Callable[[Sample], bool]
    loss_reason: str
    """The name under which samples without a score are counted."""


def _lacks_teacher(sample: Sample) -> bool:
    return sample.teacher_kl_weights is not None and sample.teacher_logprobs is None


TEACHER = WantedScores("teacher_logprobs", _lacks_teacher, "teacher_failed")


class ReferenceScorer:
    """Asks a reference model how likely the sampled tokens are."""

    def __init__(
        self,
        pool: Pool,
        name: str,
        policy: FailureHandling = DEFAULT_HANDLING,
        wanted: WantedScores = TEACHER,
        model: str = "",
    ) -> None:
        """`model` names the one to ask, where the pool serves several; empty for the policy itself."""
        self._pool, self.name, self._policy, self._empty = pool, name, policy, 0
        self._wanted, self._model = wanted, model
        self.cause = ""
        """Why a sample was last left without a score."""
        concurrency = pool.ref.concurrency if isinstance(pool, FrozenPool) else MAX_CONCURRENT_SCORES
        self._semaphore = asyncio.Semaphore(concurrency)

    @classmethod
    async def connect(
        cls, ref: PolicyOrModel, context: AlgorithmContext, wanted: WantedScores = TEACHER, where: str = ""
    ) -> "ReferenceScorer":
        """The policy, or a frozen model that can score at the run's temperature. `where` is for errors."""
        if ref == "policy":
            return cls(context.client.pool, "the policy", context.teacher_failures, wanted)
        where, name = where or f"environment `{context.env}`", f"`{ref.name}` at {ref.where}"
        temperature = context.client.sampling.temperature
        try:
            pool = await context.attach(ref)
        except EngineError as error:
            raise AlgorithmError(f"{where}: {error}") from error
        if temperature != 1.0 and not pool.scores_any_temperature:
            raise AlgorithmError(
                f"{where}: {name} scores at temperature 1 only, and the run "
                f"samples at {temperature:g}: set sampling.temperature = 1.0, or serve it with `paceline serve`"
            )
        try:
            await pool.score([context.client.renderer.prompt([{"role": "user", "content": "?"}])], temperature)
        except EngineError as error:
            raise AlgorithmError(f"{where}: {name} cannot score: {error}") from error
        return cls(pool, name, context.teacher_failures, wanted)

    async def add_logprobs(
        self, groups: Sequence[Group], context: Context = lambda *_: ReferencePrompt(), *, whole_batch: bool = True
    ) -> Counter[str]:
        """Put log probabilities on each sample that lacks them. A sample that cannot be scored is dropped: it would be
        trained towards nothing. One that was scored for an earlier training keeps that. A reference that scores nothing
        in several whole batches stops the run."""
        pairs = [(rollout, sample) for group in groups for rollout in group.rollouts for sample in rollout.samples]
        pending = PendingBatch(sum(self._wanted.is_lacking(sample) for _, sample in pairs))
        if not pending.total:
            return Counter()
        progress = asyncio.create_task(self._log_progress(pending), name="progress of a reference")
        try:
            answers = await gather_or_cancel([self._score_sample(pending, s, context, rollout) for rollout, s in pairs])
        finally:
            progress.cancel()
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            rollout.samples = []
        for (rollout, _), answer in zip(pairs, answers, strict=True):
            if answer is not None:
                rollout.samples.append(answer)
        if pending.lost:
            self.cause = pending.cause
            text = "%s left %d of %d samples without a score: %s"
            log.warning(text, self.name, pending.lost, pending.total, pending.cause)
        if whole_batch:
            self._empty = self._empty + 1 if pending.lost == pending.total else 0
        if self._empty >= MAX_EMPTY_BATCHES:
            raise AlgorithmError(
                f"{self.name} scored nothing in {self._empty} batches: {pending.cause}. "
                "See that it is up and large enough, then add --resume latest"
            )
        return Counter({self._wanted.loss_reason: pending.lost} if pending.lost else {})

    async def _score_sample(
        self, pending: "PendingBatch", sample: Sample, context: Context, rollout: Rollout
    ) -> Sample | None:
        if not self._wanted.is_lacking(sample):
            return sample
        async with self._semaphore:  # bounded: those before it each have SECONDS
            now = asyncio.get_running_loop().time
            for failed in count(1):
                before, began = pending.answered, now()
                if pending.abandoned:
                    break
                try:
                    scored = await self._request_scores(sample, context(rollout, sample))
                except EngineError as error:
                    pending.cause = pending.cause or str(error)
                    # No request had an answer in all that time: those that still wait for their turn need not wait too.
                    pending.abandoned = pending.abandoned or (pending.answered == before and now() - began >= SECONDS)
                    if self._policy.choice == "fail":
                        text = f'{self.name} could not score a sample: {error} (failures.teacher = "fail")'
                        raise AlgorithmError(text) from error
                    if pending.abandoned or isinstance(error, RequestError) or not self._policy.retries(failed):
                        break
                    await asyncio.sleep(self._policy.pause(failed))
                else:
                    pending.answered += 1
                    return scored
        pending.lost += 1
        return None

    async def _log_progress(self, pending: "PendingBatch") -> None:
        """Says every now and then how far it is, and what is in the way, until it is cancelled."""
        now = asyncio.get_running_loop().time
        began = now()
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)  # bounded: by the batch, which cancels it
            why = pending.cause or self._pool.trouble or "no answer yet"
            text = "waiting for %s since %.0f s: %d of %d samples are scored: %s"
            log.warning(text, self.name, now() - began, pending.answered, pending.total, why)

    async def _request_scores(self, sample: Sample, setting: ReferencePrompt) -> Sample:
        ids = [*setting.head, *sample.token_ids[setting.cut :].tolist()]
        logprobs = np.zeros(len(sample), np.float32)
        for temperature in np.unique(sample.temperatures[sample.loss_mask]):
            (scores,) = await self._pool.score([ids], float(temperature), self._model, SECONDS)
            if len(scores) != len(ids) or not np.isfinite(scores).all():
                raise EngineError(f"{self.name} gave {len(scores)} scores for {len(ids)} tokens, or not all finite")
            here = sample.loss_mask & (sample.temperatures == temperature)
            aligned = np.concatenate([np.zeros(setting.cut), scores[len(setting.head) :]])
            logprobs[here] = aligned[here]
        return sample.with_streams(**{self._wanted.stream: logprobs})


@dataclass(slots=True)
class PendingBatch:
    """One batch on its way through a reference."""

    total: int
    answered: int = 0
    lost: int = 0
    cause: str = ""
    abandoned: bool = False
    """It is not to be waited for any more."""
