"""The trainer in mlx: a model of mlx-lm in one process, its gradients, weights and checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from paceline.config import trainer as config
from paceline.config.hardware import unsupported_trainer_settings as refused
from paceline.data import MicroBatch
from paceline.errors import TrainerError
from paceline.model.mlx.loading import MlxModel, clone_model
from paceline.model.mlx.lora import adapter_tensors
from paceline.trainer.backend import PolicyBackend, policy_steps
from paceline.trainer.loss import LossStats
from paceline.trainer.mlx import checkpoint
from paceline.trainer.mlx.forward import MlxForwardPass
from paceline.trainer.mlx.optimizer import MlxAdamW, MlxTensors
from paceline.trainer.terms import TrainedTokens, streams_of, trained_positions
from paceline.trainer.trainer import LocalTrainer
from paceline.weights.mlx_arrays import evaluate
from paceline.weights.update import POLICY_MODEL, Adapter, Canary, WeightUpdate, canary_ids, canary_of


class MlxPolicy(PolicyBackend):
    """A policy in mlx, in one process.

    Each micro-batch is computed before the next begins, or the graphs of all would lie in memory at once. An array that
    is still to be computed belongs to the thread that asked for it: everything that leaves the trainer's thread, and
    everything a step leaves behind, has been computed.
    """

    def __init__(self, model: MlxModel, c: config.TrainerConfig, total_steps: int | None = None) -> None:
        super().__init__(c)
        _check(model, c)
        self._model, self.net, self.dtype = model, model.net, model.dtype
        model.net.eval()
        self.parameters = MlxTensors(model.net)
        self.forward = MlxForwardPass(model, c.gradient_checkpointing)
        steps = policy_steps(c, total_steps)
        self.optimizer = MlxAdamW(self.parameters, c.optimizer, steps, model.dtype == mx.float16)

    # -- gradients --------------------------------------------------------------------------------------------------

    def tokens(self, micro_batch: MicroBatch) -> TrainedTokens:
        """The tokens that train, as the policy sees them now."""
        streams = {name: mx.array(stream) for name, stream in streams_of(micro_batch).items()}
        logprobs, entropy = self.forward.logprobs(
            micro_batch, trained_positions(micro_batch), entropy=True, entropy_grad=bool(self._config.entropy_coef)
        )
        assert entropy is not None
        return TrainedTokens(logprobs=logprobs, entropy=entropy, names=micro_batch.names, **streams)

    def backward(
        self,
        micro_batch: MicroBatch,
        names: Sequence[str],
        losses_of: Callable[[TrainedTokens], tuple[Mapping[str, mx.array], LossStats]],
        accumulate_into: Callable[[str], AbstractContextManager] = nullcontext,
        on_tokens: Callable[[TrainedTokens], None] | None = None,
    ) -> LossStats:
        """A forward and a backward pass for each loss: what one has computed mlx does not keep for the next."""
        sums, draws = LossStats({}), self.forward.dropout_draws
        if not len(trained_positions(micro_batch)):
            return sums
        if on_tokens is not None:
            on_tokens(self.tokens(micro_batch))
        for name in names:
            self.forward.dropout_draws = draws  # one micro-batch, one draw of noise

            def one(name: str = name) -> tuple[mx.array, tuple[dict[str, mx.array], mx.array | None]]:
                by_name, sums = losses_of(self.tokens(micro_batch))
                return by_name[name], (sums.values, sums.tokens)

            with accumulate_into(name):
                sums = LossStats(*self.optimizer.backward(one))
        return sums

    def value_model(self, c: config.OptimizerConfig, total_steps: int | None) -> "MlxValueModel":
        return MlxValueModel(self._model, c, total_steps, self._config.gradient_checkpointing)

    # -- weights and checkpoints ------------------------------------------------------------------------------------

    def canary(self) -> Canary:
        """Log probabilities of a few fixed tokens under the current weights."""
        ids = canary_ids(self._model.vocabulary)
        return canary_of(ids, self.forward.sequence(ids), self._model.dtype)

    def weights(self, version: int) -> WeightUpdate:
        canary, adapter = self.canary(), adapter_tensors(self.net)
        if adapter is None:
            return WeightUpdate(version, evaluate(self.parameters.current()), canary=canary)
        tensors, scale = adapter
        return WeightUpdate(version, evaluate(tensors), Adapter(POLICY_MODEL, scale), canary=canary)

    def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
        checkpoint.export(self._model, folder, tokenizer)

    def save(self, folder: Path, tensors: Mapping[str, mx.array], state: Mapping) -> None:
        checkpoint.write(folder, tensors, {**state, "draws": self.forward.dropout_draws})

    def read(self, folder: Path) -> tuple[dict[str, mx.array], dict]:
        return checkpoint.read(folder)

    def restore_random(self, tensors: Mapping[str, mx.array], state: Mapping) -> None:
        self.forward.dropout_draws = state.get("draws", 0)

    def peak_bytes(self) -> float:
        """Memory that Metal holds is not counted as the process's own."""
        return max(super().peak_bytes(), float(mx.get_peak_memory()))


class MlxValueModel(nn.Module):
    """The critic's value model. It shares every array with the policy until one of the two learns. `recompute`: see
    `MlxForwardPass`."""

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


class MlxTrainer(LocalTrainer):
    """Trains a causal LM of mlx-lm, or the adapters beside its layers."""

    policy: MlxPolicy

    def __init__(
        self, model: MlxModel, c: config.TrainerConfig, *, total_steps: int | None = None, dumps: Path | None = None
    ) -> None:
        super().__init__(MlxPolicy(model, c, total_steps), c, model.config, total_steps, dumps)


def _check(model: MlxModel, c: config.TrainerConfig) -> None:
    """Refuse by name what would otherwise be left out without a word."""
    for problem in refused(c):
        raise TrainerError(problem)
    if not model.net.trainable_parameters():
        raise TrainerError("nothing of this model trains: it was frozen, and no adapter is attached")
    if model.quantised and any("lora_" not in name for name in MlxTensors(model.net).current()):
        raise TrainerError("a quantised model cannot be trained whole: write [model.lora], which trains beside it")
