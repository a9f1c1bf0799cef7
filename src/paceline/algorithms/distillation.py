"""On-policy distillation: from another model (OPD), or from the policy shown a demonstration (OPSD)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.algorithms.base import Algorithm, AlgorithmContext, AlgorithmError
from paceline.algorithms.reference_scorer import ReferencePrompt, ReferenceScorer
from paceline.config.algorithm import OPDConfig, OPSDConfig
from paceline.data import Row, Sample, find_bad_rows
from paceline.data.rollout import message_text
from paceline.rollout import Group, Message, RenderError, Rollout, threads


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
            rollout.samples = [with_teacher_kl_weights(sample, self._weight) for sample in rollout.samples]

    async def finish_batch(self, groups: Sequence[Group]) -> Mapping[str, int]:
        return await self._teacher.add_logprobs(groups)


def with_teacher_kl_weights(sample: Sample, weight: float = 1.0) -> Sample:
    """Every sampled token trains towards the reference, and by no reward."""
    nothing = np.zeros(len(sample), np.float32)
    return sample.with_streams(rl_weights=nothing, teacher_kl_weights=sample.loss_mask * np.float32(weight))


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
                    rollout.samples = [
                        with_teacher_kl_weights(sample, mean / max(1, length)) for sample in rollout.samples
                    ]

    async def finish_batch(self, groups: Sequence[Group]) -> Mapping[str, int]:
        lost = await self._teacher.add_logprobs(groups, self._reference_prompt)
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
