"""A policy that learns in mlx."""

from collections.abc import Mapping, Sequence

import mlx.core as mx

from paceline.config import trainer as config
from paceline.config.apple import refused_of_trainer as refused
from paceline.data import Sample
from paceline.model.mlx.loading import MlxModel
from paceline.model.song import canary_ids, signed
from paceline.model.weights import Array, Canary
from paceline.trainer.base import TrainerError
from paceline.trainer.batch import BUDGET, Batch
from paceline.trainer.learner import Learner
from paceline.trainer.mlx.critic import MlxCritic
from paceline.trainer.mlx.forward import Forward
from paceline.trainer.mlx.optimizer import MlxAdamW
from paceline.trainer.mlx.parameters import Parameters
from paceline.trainer.mlx.reference import Reference
from paceline.trainer.mlx.stepping import MlxStepper
from paceline.trainer.peak import process_bytes
from paceline.trainer.preparing import Preparation
from paceline.trainer.schedule import lengths


class MlxLearner(Learner):
    """A policy with its optimizer, and beside them whatever the settings ask for: a KL reference, a critic."""

    optimizer: MlxAdamW
    stepper: MlxStepper

    def __init__(self, model: MlxModel, c: config.Trainer, total_steps: int | None = None) -> None:
        super().__init__(c)
        _check(model, c)
        self._model = model
        model.net.eval()
        self.parameters = Parameters(model.net)
        self.forward = Forward(model, c.gradient_checkpointing)
        own, critics = lengths(c, total_steps)
        self.optimizer = MlxAdamW(self.parameters, c.optimizer, own, model.dtype == mx.float16)
        self.stepper = MlxStepper(model, c, self.forward, self.optimizer)
        self._reference = Reference(self.parameters, c.kl) if c.kl is not None else None
        self._critic = MlxCritic(model, c, critics) if c.critic is not None else None
        self._preparation = Preparation(c, self.forward, self._reference, self._critic)

    def canary(self) -> Canary:
        ids = canary_ids(self._model)
        return signed(ids, self.forward.sequence(ids), self._model.dtype)

    def peak_bytes(self) -> float:
        """What Metal holds is not counted as the process's own."""
        return max(process_bytes(), float(mx.get_peak_memory()))

    def state(self) -> dict:
        return super().state() | {"draws": self.forward.draws}

    def load(self, tensors: Mapping[str, Array], state: Mapping) -> None:
        super().load(tensors, state)
        self.forward.draws = state.get("draws", 0)

    @property
    def _budget(self) -> int:
        given = self._config.micro_batch_tokens
        return BUDGET if given == "auto" else given

    def _together(self, samples: Sequence[Sample]) -> Batch:
        return Batch.alone(samples, self._config, self._budget)


def _check(model: MlxModel, c: config.Trainer) -> None:
    """Refuse by name what would otherwise be left out without a word."""
    for problem in refused(c):
        raise TrainerError(problem)
    if not model.net.trainable_parameters():
        raise TrainerError("nothing of this model trains: it was frozen, and no adapter is attached")
    if model.quantised and any("lora_" not in name for name in Parameters(model.net).now()):
        raise TrainerError("a quantised model cannot be trained whole: write [model.lora], which trains beside it")
