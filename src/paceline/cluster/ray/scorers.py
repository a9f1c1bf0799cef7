"""Teachers that the run serves itself: scorers as Ray actors, as many as `cluster.scorers` says for each model."""

import asyncio
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from paceline.cluster.ray.engines import EngineActor, RayEngine
from paceline.cluster.serving import scoring
from paceline.config import RunConfig
from paceline.config.model import Model
from paceline.config.reference import ModelRef
from paceline.inference.frozen import SAMPLE, Frozen, FrozenPool, attach, same_words
from paceline.model import load_tokenizer


class ScorerActor(EngineActor):
    """One scorer, which never samples. Started again after a death it is as good as before: its model is frozen."""

    serves = scoring


class RayScorer(RayEngine):
    """A handle on one. It belongs to the placement, not to whoever asks it."""

    async def aclose(self) -> None: ...


class Scorers:
    """Finds whoever scores for a reference: the run's own actors, which share questions by least load, or an endpoint
    that somebody else started."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, of: dict[str, list[RayScorer]]) -> None:
        self._config, self._tokenizer, self._of = config, tokenizer, of

    async def attach(self, ref: ModelRef) -> FrozenPool:
        if ref.base_url is not None:
            return await attach(ref, self._tokenizer)
        theirs = await asyncio.to_thread(load_tokenizer, of_teacher(self._config, ref.name).model)
        same_words(f"`{ref.name}`", self._tokenizer.encode(SAMPLE), theirs.encode(SAMPLE))
        engines: Sequence[Frozen] = self._of[ref.name]
        return FrozenPool(engines, ref)


def of_teacher(config: RunConfig, name: str) -> RunConfig:
    """What a scorer of this model is told: the run's settings, with another model and no adapter."""
    policy = config.model
    teacher = Model(
        name=name, dtype=policy.dtype, fp32_head=policy.fp32_head, trust_remote_code=policy.trust_remote_code
    )
    return config.model_copy(update={"model": teacher})
