"""The critic's value model in mlx."""

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import MicroBatch
from paceline.model.mlx.loading import MlxModel, clone_model
from paceline.trainer.mlx.forward import MlxForwardPass
from paceline.trainer.mlx.optimizer import MlxAdamW, MlxTensors


class MlxValueModel(nn.Module):
    """Shares every array with the policy until one of the two learns. `recompute`: see `MlxForwardPass`."""

    def __init__(self, policy: MlxModel, c: config.OptimizerConfig, total_steps: int | None, recompute: bool) -> None:
        super().__init__()
        copied = clone_model(policy)
        self.body = copied.net
        self.body.pop("lm_head", None)  # logits are not needed here
        self.value = nn.Linear(policy.config.get_text_config().hidden_size, 1)
        self.value.update({name: mx.zeros_like(array) for name, array in self.value.items()})
        self.forward_pass = MlxForwardPass(copied, recompute)
        self.eval()
        self.optimizer = MlxAdamW(MlxTensors(self), c, total_steps, policy.dtype == mx.float16)

    def __call__(self, micro_batch: MicroBatch, positions: NDArray) -> mx.array:
        """Not by a product of matrices: of one column mlx adds the parts up in an order that depends on how it lies in
        memory, and after a resume it lies otherwise."""
        before = self.forward_pass.before(micro_batch, positions).astype(mx.float32)
        return (before * self.value.weight).sum(-1) + self.value.bias

    def values(self, micro_batch: MicroBatch) -> NDArray:
        positions = micro_batch.loss_mask.nonzero()[0]
        return np.asarray(self(micro_batch, positions)) if len(positions) else np.zeros(0)

    def backward(
        self, micro_batch: MicroBatch, positions: NDArray, targets: Sequence[NDArray], loss_of: Callable[..., mx.array]
    ) -> float:
        if not len(positions):
            return 0.0
        arrays = [mx.array(target) for target in targets]

        def whole() -> tuple[mx.array, mx.array]:
            loss = loss_of(self(micro_batch, positions), *arrays)
            return loss, loss

        return self.optimizer.backward(whole).item()

    def clip(self, losses: list[float]) -> tuple[float, float]:
        return sum(losses), self.optimizer.clip()

    def state(self) -> dict[str, int]:
        return {"draws": self.forward_pass.dropout_draws}

    def restore(self, state: Mapping) -> None:
        self.forward_pass.dropout_draws = state.get("draws", 0)
