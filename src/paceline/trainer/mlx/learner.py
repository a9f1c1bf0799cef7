"""Trains a policy in mlx: its optimizer, KL reference and critic."""

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.config.apple import refused_of_trainer as refused
from paceline.data import MicroBatch
from paceline.model.mlx.loading import MlxModel, twin
from paceline.trainer.base import TrainerError
from paceline.trainer.batch import TrainedTokens
from paceline.trainer.critic import Critic, value_loss
from paceline.trainer.learner import Learner, Stream, component, components, streams_of, trained
from paceline.trainer.loss import LossStats
from paceline.trainer.mlx.forward import MlxForwardPass
from paceline.trainer.mlx.optimizer import ADAPTER, MlxAdamW, Parameters
from paceline.trainer.optimizer import schedule_lengths
from paceline.trainer.reference import KLReference
from paceline.weights.update import Array, Canary, canary_ids, canary_of, fingerprint


class MlxValueModel(nn.Module):
    """A copy of the policy, which shares every array until one of the two learns, with one number per token instead of
    logits. The new layer starts at zero, so that the first advantages are plain returns."""

    def __init__(self, policy: MlxModel, again: bool) -> None:
        super().__init__()
        copied = twin(policy)
        self.body = copied.net
        self.body.pop("lm_head", None)  # logits are not needed here
        self.value = nn.Linear(policy.config.get_text_config().hidden_size, 1)
        self.value.update({name: mx.zeros_like(array) for name, array in self.value.items()})
        self.passes = MlxForwardPass(copied, again)

    def __call__(self, micro_batch: MicroBatch, places: NDArray) -> mx.array:
        """Values of choosing at `places`, read off the token before. Not by a product of matrices: of one column mlx
        adds the parts up in an order that depends on how it lies in memory, and after a resume it lies otherwise."""
        before = self.passes.before(micro_batch, places).astype(mx.float32)
        return (before * self.value.weight).sum(-1) + self.value.bias


class MlxCritic(Critic):
    """A critic with a trunk of its own, begun as a copy of the policy's."""

    def __init__(self, policy: MlxModel, c: config.TrainerConfig, total_steps: int | None) -> None:
        super().__init__(c, total_steps)
        self._policy = policy

    def _build(self, c: config.OptimizerConfig) -> MlxAdamW:
        self._model = MlxValueModel(self._policy, self._trainer.gradient_checkpointing)
        self._model.eval()
        return MlxAdamW(Parameters(self._model), c, self._total, self._policy.dtype == mx.float16)

    def _read(self, micro_batch: MicroBatch, places: NDArray) -> NDArray:
        return np.asarray(self._model(micro_batch, places)) if len(places) else np.zeros(0)

    def _backward(self, micro_batch: MicroBatch, places: NDArray, *targets: NDArray) -> float:
        if not len(places):
            return 0.0
        old, returns, scales = map(mx.array, targets)

        def whole() -> tuple[mx.array, mx.array]:
            values = self._model(micro_batch, places)
            loss = (value_loss(values, old, returns, self._config.value_clip) * scales).sum()
            return loss, loss

        return self._optimizer.backward(whole).item()

    def _clip(self, losses: list[float]) -> tuple[float, float]:
        return sum(losses), self._optimizer.clip()

    def state(self) -> dict[str, float]:
        return super().state() | ({} if self._optimizer is None else {"draws": self._model.passes.draws})

    def load(self, tensors: Mapping[str, Array], state: Mapping) -> None:
        super().load(tensors, state)
        if self._optimizer is not None:
            self._model.passes.draws = state.get("draws", 0)


Differentiated = tuple[mx.array, dict[str, mx.array]]
"""A loss, and sums as mlx can carry them out of a function that it differentiates."""


class MlxKLReference(KLReference):
    """Arrays are replaced, never changed: the reference may share them with the policy."""

    def __init__(self, parameters: Parameters, c: config.KLConfig) -> None:
        self._parameters = parameters
        super().__init__(c, all(name.endswith(ADAPTER) for name in parameters.now()))
        mx.eval(self._tensors)

    def _now(self) -> dict[str, mx.array]:
        return self._parameters.now()

    def _copy(self, parameter: mx.array) -> mx.array:
        return parameter.astype(mx.float32) if self._config.reference == "ema" else parameter

    def _aside(self, names: Mapping[str, mx.array]) -> dict[str, mx.array]:
        now = self._now()
        return {name: now[name] for name in names}

    def _put(self, tensors: Mapping[str, mx.array]) -> None:
        self._parameters.put(tensors)

    def _keep(self, tensors: Mapping[str, mx.array]) -> None:
        self._tensors = {name: tensor.astype(self._tensors[name].dtype) for name, tensor in tensors.items()}
        mx.eval(self._tensors)

    def _average(self, name: str, master: mx.array, weight: float) -> None:
        self._tensors[name] += weight * (master - self._tensors[name])
        mx.eval(self._tensors[name])

    def _fingerprint(self) -> str:
        return fingerprint(self._tensors.items())


class MlxLearner(Learner):
    """Each micro-batch is computed before the next begins, or the graphs of all would lie in memory at once."""

    forward: MlxForwardPass
    optimizer: MlxAdamW

    def __init__(self, model: MlxModel, c: config.TrainerConfig, total_steps: int | None = None) -> None:
        _check(model, c)
        self._model = model
        model.net.eval()
        self.parameters = Parameters(model.net)
        forward = MlxForwardPass(model, c.gradient_checkpointing)
        own, critics = schedule_lengths(c, total_steps)
        optimizer = MlxAdamW(self.parameters, c.optimizer, own, model.dtype == mx.float16)
        reference = MlxKLReference(self.parameters, c.kl) if c.kl is not None else None
        critic = MlxCritic(model, c, critics) if c.critic is not None else None
        super().__init__(c, model.net, forward, optimizer, reference, critic)

    def backward(self, micro_batch: MicroBatch, version: int, first: bool = True) -> LossStats:
        if not len(trained(micro_batch)):
            return LossStats({})
        if self.watch is not None:
            draws, tokens = self.forward.draws, self.tokens(micro_batch)
            self.watch(micro_batch, tokens, self._loss.per_token(tokens))
            self.forward.draws = draws  # the pass that trains draws the same noise

        def whole() -> Differentiated:
            loss, sums = self._loss(self.tokens(micro_batch), version, first)
            return loss, sums.values

        return LossStats(self.optimizer.backward(whole))

    def tokens(self, micro_batch: MicroBatch) -> TrainedTokens:
        """The tokens that train, as the policy sees them now."""
        streams = {name: mx.array(stream) for name, stream in streams_of(micro_batch).items()}
        logprobs, entropy = self.forward.logprobs(
            micro_batch, trained(micro_batch), entropy=True, entropy_grad=bool(self._config.entropy_coef)
        )
        assert entropy is not None
        return TrainedTokens(logprobs=logprobs, entropy=entropy, names=micro_batch.names, **streams)

    def _add(self, stream: Stream, micro_batch: MicroBatch, version: int) -> LossStats:
        """A pass for each component: what one has computed mlx does not keep for the next."""
        sums, draws = LossStats({}), self.forward.draws
        for name in components(micro_batch):
            self.forward.draws = draws  # one micro-batch, one draw of noise

            def part(name: str = name) -> Differentiated:
                parts, sums = self._loss.parts(self.tokens(micro_batch), version)
                return component(parts, name), sums.values

            with stream.summing(name):
                sums = LossStats(self.optimizer.backward(part))
        return sums

    def _over_ranks(self, values: mx.array | NDArray) -> NDArray:
        return np.array(values, np.float64)

    def canary(self) -> Canary:
        ids = canary_ids(self._model.vocabulary)
        return canary_of(ids, self.forward.sequence(ids), self._model.dtype)

    def peak_bytes(self) -> float:
        """Memory that Metal holds is not counted as the process's own."""
        return max(super().peak_bytes(), float(mx.get_peak_memory()))

    def state(self) -> dict:
        return super().state() | {"draws": self.forward.draws}

    def load(self, tensors: Mapping[str, Array], state: Mapping) -> None:
        super().load(tensors, state)
        self.forward.draws = state.get("draws", 0)


def _check(model: MlxModel, c: config.TrainerConfig) -> None:
    """Refuse by name what would otherwise be left out without a word."""
    for problem in refused(c):
        raise TrainerError(problem)
    if not model.net.trainable_parameters():
        raise TrainerError("nothing of this model trains: it was frozen, and no adapter is attached")
    if model.quantised and any("lora_" not in name for name in Parameters(model.net).now()):
        raise TrainerError("a quantised model cannot be trained whole: write [model.lora], which trains beside it")
