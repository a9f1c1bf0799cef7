"""Log probabilities of another model, or of the policy told more, for what the policy sampled."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from paceline.algorithms.base import AlgorithmError, Means
from paceline.config.reference import Reference as Ref
from paceline.data import Sample
from paceline.inference import EngineError, Pool
from paceline.inference.frozen import FrozenPool
from paceline.rollout import Group, Rollout

SECONDS = 120.0
"""How long one score may take, and how long a reference that is gone is waited for in one batch."""
AT_ONCE = 32
"""Scores asked of the policy itself at once; a frozen endpoint has a limit of its own."""
MOST_EMPTY = 3
"""Batches in a row in which the reference scored nothing at all before the run stops."""
FAILED = "teacher_failed"
log = logging.getLogger(__name__)


class Setting(NamedTuple):
    """What the reference reads before what was sampled: `head` stands in place of a sample's first `cut` tokens."""

    head: Sequence[int] = ()
    cut: int = 0


Context = Callable[[Rollout, Sample], Setting]


class Reference:
    """Who is asked how likely the sampled tokens are."""

    def __init__(self, pool: Pool, name: str) -> None:
        self._pool, self._name = pool, name
        self._places = asyncio.Semaphore(pool.ref.concurrency if isinstance(pool, FrozenPool) else AT_ONCE)
        self._empty = 0

    @classmethod
    async def connect(cls, ref: Ref, means: Means) -> "Reference":
        """The policy, or a frozen model that can score at the run's temperature."""
        if ref == "policy":
            return cls(means.voice.pool, "the policy")
        pool = await means.attach(ref)
        temperature = means.voice.sampling.temperature
        if temperature != 1.0 and not pool.any_temperature:
            raise AlgorithmError(
                f"environment `{means.env}`: `{ref.name}` at {ref.base_url} scores at temperature 1 only, and the run "
                f"samples at {temperature:g}: set sampling.temperature = 1.0, or serve it with `paceline serve`"
            )
        try:
            await pool.score([means.voice.renderer.prompt([{"role": "user", "content": "?"}])], temperature)
        except EngineError as error:
            raise AlgorithmError(f"environment `{means.env}`: `{ref.name}` cannot score: {error}") from error
        return cls(pool, f"`{ref.name}` at {ref.base_url}")

    async def refer(self, groups: Sequence[Group], context: Context = lambda *_: Setting()) -> Counter[str]:
        """Put `ref_logprobs` on each sample that has weights for them. One without a score is dropped: trained without
        it would be trained towards nothing. One that has it from an earlier training keeps it. A reference that is lost
        for good stops the run."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        wanted = [sample for rollout in rollouts for sample in rollout.samples if _lacks(sample)]
        causes: list[str] = []
        answered, gone = 0, False

        async def one(rollout: Rollout, sample: Sample) -> Sample | None:
            nonlocal answered, gone
            if not _lacks(sample):
                return sample
            async with self._places:
                before, began = answered, asyncio.get_running_loop().time()
                try:
                    if gone:
                        raise EngineError(causes[0])
                    scored = await self._scored(sample, context(rollout, sample))
                except EngineError as error:
                    causes.append(str(error))
                    # Nobody had an answer in all that time: those who still wait for their turn need not wait too.
                    gone = gone or (answered == before and asyncio.get_running_loop().time() - began >= SECONDS)
                    return None
                answered += 1
                return scored

        for rollout, answers in zip(
            rollouts,
            await asyncio.gather(*(asyncio.gather(*(one(r, sample) for sample in r.samples)) for r in rollouts)),
            strict=True,
        ):
            rollout.samples = [sample for sample in answers if sample is not None]
        self._judge(len(wanted), causes)
        return Counter({FAILED: len(causes)} if causes else {})

    async def _scored(self, sample: Sample, setting: Setting) -> Sample:
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

    def _judge(self, wanted: int, causes: list[str]) -> None:
        if causes:
            log.warning("%s left %d of %d samples without a score: %s", self._name, len(causes), wanted, causes[0])
        self._empty = self._empty + 1 if wanted and len(causes) == wanted else 0
        if self._empty >= MOST_EMPTY:
            raise AlgorithmError(
                f"{self._name} scored nothing in {self._empty} batches: {causes[0]}. "
                "See that it is up and large enough, then add --resume latest"
            )


def _lacks(sample: Sample) -> bool:
    return sample.ref_kl_weights is not None and sample.ref_logprobs is None
