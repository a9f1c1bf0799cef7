"""On-policy distillation: from another model (OPD), or from the policy shown a demonstration (OPSD)."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from paceline.algorithms.base import Algorithm, AlgorithmContext, AlgorithmError
from paceline.clients import Pool
from paceline.clients.frozen import FrozenPool
from paceline.config.algorithm import OPDConfig, OPSDConfig
from paceline.config.filters import DEFAULT_HANDLING, FailureHandling
from paceline.config.model import Reference as Ref
from paceline.data import Row, Sample, find_bad_rows
from paceline.data.rollout import message_text
from paceline.errors import EngineError, RequestError
from paceline.rollout import Group, Message, RenderError, Rollout, threads
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


class ReferenceScorer:
    """Asks a reference model how likely the sampled tokens are."""

    def __init__(self, pool: Pool, name: str, policy: FailureHandling = DEFAULT_HANDLING) -> None:
        self._pool, self._name, self._policy, self._empty = pool, name, policy, 0
        concurrency = pool.ref.concurrency if isinstance(pool, FrozenPool) else MAX_CONCURRENT_SCORES
        self._semaphore = asyncio.Semaphore(concurrency)

    @classmethod
    async def connect(cls, ref: Ref, context: AlgorithmContext) -> "ReferenceScorer":
        """The policy, or a frozen model that can score at the run's temperature."""
        if ref == "policy":
            return cls(context.client.pool, "the policy", context.teacher_failures)
        pool = await context.attach(ref)
        temperature = context.client.sampling.temperature
        if temperature != 1.0 and not pool.scores_any_temperature:
            raise AlgorithmError(
                f"environment `{context.env}`: `{ref.name}` at {ref.where} scores at temperature 1 only, and the run "
                f"samples at {temperature:g}: set sampling.temperature = 1.0, or serve it with `paceline serve`"
            )
        try:
            await pool.score([context.client.renderer.prompt([{"role": "user", "content": "?"}])], temperature)
        except EngineError as error:
            raise AlgorithmError(f"environment `{context.env}`: `{ref.name}` cannot score: {error}") from error
        return cls(pool, f"`{ref.name}` at {ref.where}", context.teacher_failures)

    async def add_teacher_logprobs(
        self, groups: Sequence[Group], context: Context = lambda *_: ReferencePrompt()
    ) -> Counter[str]:
        """Put `teacher_logprobs` on each sample that has weights for them. A sample without them is dropped: it would
        be trained towards nothing. One that has them from an earlier training keeps them. A reference that is lost for
        good stops the run."""
        pairs = [(rollout, sample) for group in groups for rollout in group.rollouts for sample in rollout.samples]
        pending = PendingBatch(sum(_lacks_scores(sample) for _, sample in pairs))
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
            text = "%s left %d of %d samples without a score: %s"
            log.warning(text, self._name, pending.lost, pending.total, pending.cause)
        self._empty = self._empty + 1 if pending.total and pending.lost == pending.total else 0
        if self._empty >= MAX_EMPTY_BATCHES:
            raise AlgorithmError(
                f"{self._name} scored nothing in {self._empty} batches: {pending.cause}. "
                "See that it is up and large enough, then add --resume latest"
            )
        return Counter(teacher_failed=pending.lost) if pending.lost else Counter()

    async def _score_sample(
        self, pending: "PendingBatch", sample: Sample, context: Context, rollout: Rollout
    ) -> Sample | None:
        if not _lacks_scores(sample):
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
                        text = f'{self._name} could not score a sample: {error} (failures.teacher = "fail")'
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
            log.warning(text, self._name, now() - began, pending.answered, pending.total, why)

    async def _request_scores(self, sample: Sample, setting: ReferencePrompt) -> Sample:
        ids = [*setting.head, *sample.token_ids[setting.cut :].tolist()]
        logprobs = np.zeros(len(sample), np.float32)
        for temperature in np.unique(sample.temperatures[sample.loss_mask]):
            (scores,) = await self._pool.score([ids], float(temperature), deadline=SECONDS)
            if len(scores) != len(ids) or not np.isfinite(scores).all():
                raise EngineError(f"{self._name} gave {len(scores)} scores for {len(ids)} tokens, or not all finite")
            here = sample.loss_mask & (sample.temperatures == temperature)
            aligned = np.concatenate([np.zeros(setting.cut), scores[len(setting.head) :]])
            logprobs[here] = aligned[here]
        return sample.with_streams(teacher_logprobs=logprobs)


@dataclass(slots=True)
class PendingBatch:
    """One batch on its way through a reference."""

    total: int
    answered: int = 0
    lost: int = 0
    cause: str = ""
    abandoned: bool = False
    """It is not to be waited for any more."""


def _lacks_scores(sample: Sample) -> bool:
    return sample.ref_kl_weights is not None and sample.teacher_logprobs is None


class OPD(Algorithm):
    """The policy plays, and a teacher says how likely it finds every token of it (arXiv 2306.13649, 2306.08543).

    What is minimised is the reverse KL, E_pi[log pi - log teacher], on what the policy itself does: unlike learning
    from the teacher's own text, it is taught where it stands, and each token is told apart from the next. The trainer
    takes the gradient against its own log probabilities, so the teacher's travel with the sample as they are, at the
    temperature it was sampled at. The reward is only watched.
    """

    def __init__(self, config: OPDConfig) -> None:
        assert config.teacher is not None
        self._ref = config.teacher
        self._weight = config.weight

    async def begin(self, context: AlgorithmContext) -> None:
        self._teacher = await ReferenceScorer.connect(self._ref, context)

    def assign(self, group: Group) -> None:
        for rollout in group.rollouts:
            rollout.samples = [with_ref_kl_weights(sample, self._weight) for sample in rollout.samples]

    async def finish_batch(self, groups: Sequence[Group]) -> Mapping[str, int]:
        return await self._teacher.add_teacher_logprobs(groups)


def with_ref_kl_weights(sample: Sample, weight: float = 1.0) -> Sample:
    """Every sampled token trains towards the reference, and by no reward."""
    nothing = np.zeros(len(sample), np.float32)
    return sample.with_streams(rl_weights=nothing, ref_kl_weights=sample.loss_mask * np.float32(weight))


class OPSD(Algorithm):
    """The policy plays, and the same policy, shown a demonstration, says how likely it finds every token of it
    (arXiv 2601.19897, 2601.18734).

    A model that has seen a good answer judges an attempt better than one that has not, with the same weights. So it is
    its own teacher: nothing else is served, and the demonstrations are never imitated word by word, which would make it
    forget. The demonstration is a block before the conversation, in the chat template's own words; behind it stand the
    sampled tokens exactly as they were sampled, all turns of a sample at once.

    The plain recipe is known to spiral: replies grow until all are cut off, and the model is lost. A reply that was cut
    off holds many tokens and no ending, long replies outvote short ones token by token, and a few words of style that
    the demonstration makes very likely or unlikely outvote the rest. Three rules stand against it, each on its own:

    - a sample that was cut off does not train (`terminated_only`);
    - the tokens of a rollout weigh mean length / own length, so that every rollout of a group pulls alike;
    - the teacher's log probability is held within `max_pull` of the sampler's.

    Together no rollout's pull exceeds mean length * max_pull, however long it is. What no rule mends is a model that
    cannot use what it is shown: its teacher is no better than itself and moves with it, so nothing holds either.
    """

    def __init__(self, config: OPSDConfig) -> None:
        self._config = config

    async def begin(self, context: AlgorithmContext) -> None:
        self._context, config = context, self._config
        self.bad_rows = find_bad_rows(context.rows, self._demonstration, AlgorithmError)
        self._teacher = await ReferenceScorer.connect(config.teacher, context)
        asked: list[Message] = [{"role": "user", "content": "?"}]
        plain, mark = context.client.renderer.text(asked), "The quick brown fox."
        try:
            told = context.client.renderer.text(self._prepend_demonstration(asked, mark))
        except RenderError:
            told = plain
        if mark not in told:
            raise AlgorithmError(
                f"environment `{context.env}`: opsd shows the demonstration as a system message, and this model's chat "
                "template does not write one: set model.chat_template to one that does"
            )

    def assign(self, group: Group) -> None:
        for rollouts in group.by_actor().values():
            lengths = [sum(int(s.loss_mask.sum()) for s in rollout.samples) for rollout in rollouts]
            mean = float(np.mean(lengths))
            for rollout, length in zip(rollouts, lengths, strict=True):
                whole = [s for s in rollout.samples if s.ended == "terminated" or not self._config.terminated_only]
                if len(whole) < len(rollout.samples):
                    rollout.samples = [_mask_out(sample) for sample in rollout.samples]
                else:
                    rollout.samples = [with_ref_kl_weights(sample, mean / max(1, length)) for sample in rollout.samples]

    async def finish_batch(self, groups: Sequence[Group]) -> Mapping[str, int]:
        lost = await self._teacher.add_teacher_logprobs(groups, self._reference_prompt)
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            rollout.samples = [self._clamp_pull(sample) for sample in rollout.samples]
        return lost

    def _reference_prompt(self, rollout: Rollout, sample: Sample) -> ReferencePrompt:
        """The first prompt with the demonstration before it, in place of the one without."""
        ids = sample.token_ids.tolist()
        turn = next(thread.turns[0] for thread in threads(rollout.turns) if thread.tokens == ids)
        if turn.messages is None:
            raise AlgorithmError(
                f"environment `{rollout.env}`: opsd puts a demonstration before the conversation, and this environment "
                "prompts with bare tokens: let it speak in messages, or use another algorithm"
            )
        told = self._prepend_demonstration(turn.messages, self._demonstration(rollout.ticket.row))
        return ReferencePrompt(self._context.client.renderer.prompt(told, turn.tools), len(turn.prompt_ids))

    def _clamp_pull(self, sample: Sample) -> Sample:
        if sample.teacher_logprobs is None or sample.logprobs is None:
            return sample
        most = np.float32(self._config.max_pull)
        held = np.clip(sample.teacher_logprobs, sample.logprobs - most, sample.logprobs + most)
        return sample.with_streams(teacher_logprobs=np.where(sample.loss_mask, held, np.float32(0)))

    def _prepend_demonstration(self, messages: Sequence[Message], demonstration: str) -> list[Message]:
        block = self._config.block.replace("{demonstration}", demonstration)
        first = messages[0] if messages else {}
        if first.get("role") in ("system", "developer"):  # one block: templates refuse a second one, or lose it
            return [{**first, "content": f"{block}\n\n{message_text(first)}"}, *messages[1:]]
        return [{"role": "system", "content": block}, *messages]

    def _demonstration(self, number: int) -> str:
        row: Row = self._context.rows[number]
        text = _as_text(row.get(self._config.demo_key))
        if not text:
            raise AlgorithmError(
                f"environment `{self._context.env}`, row {number}: there is no demonstration under "
                f"`{self._config.demo_key}`: add it, or name the field that has it with demo_key; the row has "
                + ", ".join(f"`{key}`" for key in row)
            )
        return text


def _mask_out(sample: Sample) -> Sample:
    """No ending, nothing to learn: a group of such samples carries no signal and makes room for another."""
    nothing = np.zeros(len(sample), np.float32)
    return sample.with_streams(advantages=nothing, rl_weights=nothing)


def _as_text(value: Any) -> str:
    """A demonstration in words: as it stands, or what is said in its messages."""
    if isinstance(value, list):
        said = [m for m in value if isinstance(m, Mapping) and isinstance(m.get("content"), str)]
        return "\n\n".join(m["content"] if len(said) == 1 else f"{m.get('role')}: {m['content']}" for m in said)
    return "" if value is None or isinstance(value, dict) else str(value)
