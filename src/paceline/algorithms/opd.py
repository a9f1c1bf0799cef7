"""On-policy distillation."""

from collections.abc import Mapping, Sequence

import numpy as np

from paceline.algorithms.base import Algorithm, Means
from paceline.algorithms.references import Reference
from paceline.config.algorithm import OPD as Config
from paceline.data import Sample
from paceline.rollout import Group


class OPD(Algorithm):
    """The policy plays, and a teacher says how likely it finds every token of it (arXiv 2306.13649, 2306.08543).

    What is minimised is the reverse KL, E_pi[log pi - log teacher], on what the policy itself does: unlike learning
    from the teacher's own text, it is taught where it stands, and each token is told apart from the next. The trainer
    takes the gradient against its own log probabilities, so the teacher's travel with the sample as they are, at the
    temperature it was sampled at. The reward is only watched.
    """

    def __init__(self, config: Config) -> None:
        assert config.teacher is not None
        self._ref = config.teacher
        self._weight = config.weight

    async def begin(self, means: Means) -> None:
        self._teacher = await Reference.connect(self._ref, means)

    def assign(self, group: Group) -> None:
        for rollout in group.rollouts:
            rollout.samples = [pulled(sample, self._weight) for sample in rollout.samples]

    async def score(self, groups: Sequence[Group]) -> Mapping[str, int]:
        return await self._teacher.refer(groups)


def pulled(sample: Sample, weight: float = 1.0) -> Sample:
    """Every sampled token trains towards the reference, and by no reward."""
    nothing = np.zeros(len(sample), np.float32)
    return sample.with_streams(rl_weights=nothing, ref_kl_weights=sample.loss_mask * np.float32(weight))
