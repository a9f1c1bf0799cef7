"""The critic in mlx."""

from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import MicroBatch
from paceline.model.mlx.loading import MlxModel, twin
from paceline.model.weights import Array
from paceline.trainer.critic import Critic, Lesson, value_loss
from paceline.trainer.mlx.forward import Forward
from paceline.trainer.mlx.optimizer import MlxAdamW
from paceline.trainer.mlx.parameters import Parameters


class ValueModel(nn.Module):
    """A copy of the policy, which shares every array until one of the two learns, with one number per token instead of
    logits. The new layer starts at zero, so that the first advantages are plain returns."""

    def __init__(self, policy: MlxModel, again: bool) -> None:
        super().__init__()
        copied = twin(policy)
        self.body = copied.net
        self.body.pop("lm_head", None)  # nobody asks for logits here
        self.value = nn.Linear(policy.config.get_text_config().hidden_size, 1)
        self.value.update({name: mx.zeros_like(array) for name, array in self.value.items()})
        self.passes = Forward(copied, again)

    def __call__(self, micro_batch: MicroBatch, places: NDArray) -> mx.array:
        """Values of choosing at `places`, read off the token before. Not by a product of matrices: of one column mlx
        adds the parts up in an order that depends on how it lies in memory, and after a resume it lies otherwise."""
        before = self.passes.before(micro_batch, places).astype(mx.float32)
        return (before * self.value.weight).sum(-1) + self.value.bias


class MlxCritic(Critic):
    """A critic with a trunk of its own, begun as a copy of the policy's."""

    _model: ValueModel
    _optimizer: MlxAdamW | None

    def __init__(self, policy: MlxModel, c: config.Trainer, total_steps: int | None) -> None:
        super().__init__(c, total_steps)
        self._policy = policy

    def _build(self, c: config.Optimizer) -> MlxAdamW:
        self._model = ValueModel(self._policy, self._trainer.gradient_checkpointing)
        self._model.eval()
        return MlxAdamW(Parameters(self._model), c, self._total, self._policy.dtype == mx.float16)

    def _read(self, micro_batch: MicroBatch, places: NDArray) -> NDArray:
        return np.asarray(self._model(micro_batch, places)) if len(places) else np.zeros(0)

    def _gradient(self, packs: Sequence[MicroBatch], lessons: Sequence[Lesson]) -> tuple[float, float]:
        assert self._optimizer is not None
        self._model.train()
        try:
            loss = sum(self._backward(micro_batch, lessons, self._optimizer) for micro_batch in packs)
        finally:
            self._model.eval()
        return loss, self._optimizer.clip()

    def _backward(self, micro_batch: MicroBatch, lessons: Sequence[Lesson], optimizer: MlxAdamW) -> float:
        places, *streams = self._targets(micro_batch, lessons)
        if not len(places):
            return 0.0
        old, returns, scales = map(mx.array, streams)

        def whole() -> tuple[mx.array, mx.array]:
            values = self._model(micro_batch, places)
            loss = (value_loss(values, old, returns, self._config.value_clip) * scales).sum()
            return loss, loss

        return optimizer.backward(whole).item()

    def state(self) -> dict[str, float]:
        return super().state() | ({} if self._optimizer is None else {"draws": self._model.passes.draws})

    def load(self, tensors: Mapping[str, Array], state: Mapping) -> None:
        super().load(tensors, state)
        if self._optimizer is not None:
            self._model.passes.draws = state.get("draws", 0)
