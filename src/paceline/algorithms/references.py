"""Scores what the policy sampled by another model, or by the policy with another prompt."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from paceline.algorithms.base import AlgorithmContext, AlgorithmError
from paceline.arena.together import together
from paceline.config.failures import USUAL, Fail, FailurePolicy, Retry
from paceline.config.model import Reference as Ref
from paceline.data import Sample
from paceline.inference import EngineError, Pool, RequestError
from paceline.inference.frozen import FrozenPool
from paceline.rollout import Group, Rollout

SECONDS = 120.0
"""How long one score may take, and how long a reference that is gone is waited for in one batch."""
AT_ONCE = 32
"""Scores asked of the policy itself at once; a frozen endpoint has a limit of its own."""
WORD_SECONDS = 30.0
"""Interval at which a batch that waits for a reference logs how far it is."""
MOST_EMPTY = 3
"""Batches in a row in which the reference scored nothing at all before the run stops."""
FAILED = "teacher_failed"
log = logging.getLogger(__name__)


class ReferencePrompt(NamedTuple):
    """The reference's prompt before the sampled tokens: `head` stands in place of a sample's first `cut` tokens."""

    head: Sequence[int] = ()
    cut: int = 0


Context = Callable[[Rollout, Sample], ReferencePrompt]


class ReferenceScorer:
    """Asks a reference model how likely the sampled tokens are."""

    def __init__(self, pool: Pool, name: str, policy: FailurePolicy = USUAL) -> None:
        self._pool, self._name, self._policy = pool, name, policy
        self._places = asyncio.Semaphore(pool.ref.concurrency if isinstance(pool, FrozenPool) else AT_ONCE)
        self._empty = 0

    @classmethod
    async def connect(cls, ref: Ref, means: AlgorithmContext) -> "ReferenceScorer":
        """The policy, or a frozen model that can score at the run's temperature."""
        if ref == "policy":
            return cls(means.voice.pool, "the policy", means.teacher)
        pool = await means.attach(ref)
        temperature = means.voice.sampling.temperature
        if temperature != 1.0 and not pool.any_temperature:
            raise AlgorithmError(
                f"environment `{means.env}`: `{ref.name}` at {ref.where} scores at temperature 1 only, and the run "
                f"samples at {temperature:g}: set sampling.temperature = 1.0, or serve it with `paceline serve`"
            )
        try:
            await pool.score([means.voice.renderer.prompt([{"role": "user", "content": "?"}])], temperature)
        except EngineError as error:
            raise AlgorithmError(f"environment `{means.env}`: `{ref.name}` cannot score: {error}") from error
        return cls(pool, f"`{ref.name}` at {ref.where}", means.teacher)

    async def refer(self, groups: Sequence[Group], context: Context = lambda *_: ReferencePrompt()) -> Counter[str]:
        """Put `ref_logprobs` on each sample that has weights for them. One without a score is dropped: trained without
        it would be trained towards nothing. One that has it from an earlier training keeps it. A reference that is lost
        for good stops the run."""
        pairs = [(rollout, sample) for group in groups for rollout in group.rollouts for sample in rollout.samples]
        errand = PendingBatch(sum(_lacks(sample) for _, sample in pairs))
        with self._telling(errand):
            answers = await together([self._one(errand, sample, context, rollout) for rollout, sample in pairs])
        for group in groups:
            for rollout in group.rollouts:
                rollout.samples = []
        for (rollout, _), answer in zip(pairs, answers, strict=True):
            if answer is not None:
                rollout.samples.append(answer)
        self._judge(errand)
        return Counter({FAILED: errand.lost} if errand.lost else {})

    async def _one(self, errand: "PendingBatch", sample: Sample, context: Context, rollout: Rollout) -> Sample | None:
        """The sample with its score; None where there is none to be had."""
        if not _lacks(sample):
            return sample
        async with self._places:  # bounded: those before it each have SECONDS
            for failed in count(1):
                before, began = errand.answered, _now()
                if errand.gone:
                    break
                try:
                    scored = await self._scored(sample, context(rollout, sample))
                except EngineError as error:
                    errand.cause = errand.cause or str(error)
                    # No request had an answer in all that time: those that still wait for their turn need not wait too.
                    errand.gone = errand.gone or (errand.answered == before and _now() - began >= SECONDS)
                    if not self._again(error, failed) or errand.gone:
                        break
                    await asyncio.sleep(Retry.pause(failed))
                else:
                    errand.answered += 1
                    return scored
        errand.lost += 1
        return None

    def _again(self, error: EngineError, failed: int) -> bool:
        """Whether to ask once more; raises where the run file wants the run to stop."""
        if isinstance(self._policy, Fail):
            raise AlgorithmError(f'{self._name} could not score a sample: {error} (failures.teacher = "fail")')
        return isinstance(self._policy, Retry) and self._policy.again(failed) and not isinstance(error, RequestError)

    @contextmanager
    def _telling(self, errand: "PendingBatch") -> Generator[None]:
        """Says every now and then how far it is, and what is in the way."""
        loop = asyncio.get_running_loop()
        began = loop.time()

        def tell() -> None:
            nonlocal timer
            why = f": {errand.cause or self._pool.trouble or 'no answer yet'}"
            text = "waiting for %s since %.0f s: %d of %d samples are scored%s"
            log.warning(text, self._name, loop.time() - began, errand.answered, errand.wanted, why)
            timer = loop.call_later(WORD_SECONDS, tell)

        timer = loop.call_later(WORD_SECONDS, tell)
        try:
            yield
        finally:
            timer.cancel()

    async def _scored(self, sample: Sample, setting: ReferencePrompt) -> Sample:
        ids = [*setting.head, *sample.token_ids[setting.cut :].tolist()]
        logprobs = np.zeros(len(sample), np.float32)
        for temperature in np.unique(sample.temperatures[sample.loss_mask]):
            (scores,) = await self._pool.score([ids], float(temperature), deadline=SECONDS)
            if len(scores) != len(ids) or not np.isfinite(scores).all():
                raise EngineError(f"{self._name} gave {len(scores)} scores for {len(ids)} tokens, or not all finite")
            here = sample.loss_mask & (sample.temperatures == temperature)
            aligned = np.concatenate([np.zeros(setting.cut), scores[len(setting.head) :]])
            logprobs[here] = aligned[here]
        return sample.with_streams(ref_logprobs=logprobs)

    def _judge(self, errand: "PendingBatch") -> None:
        if errand.lost:
            text = "%s left %d of %d samples without a score: %s"
            log.warning(text, self._name, errand.lost, errand.wanted, errand.cause)
        self._empty = self._empty + 1 if errand.wanted and errand.lost == errand.wanted else 0
        if self._empty >= MOST_EMPTY:
            raise AlgorithmError(
                f"{self._name} scored nothing in {self._empty} batches: {errand.cause}. "
                "See that it is up and large enough, then add --resume latest"
            )


@dataclass(slots=True)
class PendingBatch:
    """One batch on its way through a reference."""

    wanted: int
    answered: int = 0
    lost: int = 0
    cause: str = ""
    """The first error."""
    gone: bool = False
    """It is not to be waited for any more."""


def _now() -> float:
    return asyncio.get_running_loop().time()


def _lacks(sample: Sample) -> bool:
    return sample.ref_kl_weights is not None and sample.ref_logprobs is None
