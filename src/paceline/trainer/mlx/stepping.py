"""One optimizer step in mlx: micro-batches differentiated one by one, their gradients summed and clipped."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import MicroBatch
from paceline.model.mlx.loading import MlxModel
from paceline.trainer.loss import Sums
from paceline.trainer.mlx.forward import Forward
from paceline.trainer.mlx.optimizer import MlxAdamW
from paceline.trainer.stepping import Stepper, streams_of, trained
from paceline.trainer.stream import Stream, component, components
from paceline.trainer.tokens import Tokens

Differentiated = tuple[mx.array, dict[str, mx.array]]
"""A loss, and sums as mlx can carry them out of a function that it differentiates."""


class MlxStepper(Stepper):
    """Each micro-batch is computed before the next begins, or the graphs of all would lie in memory at once."""

    def __init__(self, model: MlxModel, c: config.Trainer, forward: Forward, optimizer: MlxAdamW) -> None:
        super().__init__(c, model.net, optimizer)
        self._forward, self._optimizer = forward, optimizer

    def backward(self, micro_batch: MicroBatch, version: int, first: bool = True) -> Sums:
        if not len(trained(micro_batch)):
            return Sums({})
        if self.watch is not None:
            draws, tokens = self._forward.draws, self.tokens(micro_batch)
            self.watch(micro_batch, tokens, self._loss.judge(tokens))
            self._forward.draws = draws  # the pass that trains draws the same noise

        def whole() -> Differentiated:
            loss, sums = self._loss(self.tokens(micro_batch), version, first)
            return loss, sums.values

        return Sums(self._optimizer.backward(whole))

    def tokens(self, micro_batch: MicroBatch) -> Tokens:
        """The tokens that train, as the policy sees them now."""
        streams = {name: mx.array(stream) for name, stream in streams_of(micro_batch).items()}
        logprobs, entropy = self._forward.logprobs(
            micro_batch, trained(micro_batch), entropy=True, entropy_grad=bool(self._config.entropy_coef)
        )
        assert entropy is not None
        return Tokens(logprobs=logprobs, entropy=entropy, names=micro_batch.names, **streams)

    def _add(self, stream: Stream, micro_batch: MicroBatch, version: int) -> Sums:
        """A pass for each component: what one has computed mlx does not keep for the next."""
        sums, draws = Sums({}), self._forward.draws
        for name in components(micro_batch):
            self._forward.draws = draws  # one micro-batch, one draw of noise

            def part(name: str = name) -> Differentiated:
                parts, sums = self._loss.parts(self.tokens(micro_batch), version)
                return component(parts, name), sums.values

            with stream.summing(name):
                sums = Sums(self._optimizer.backward(part))
        return sums

    def _clip(self) -> float:
        return self._optimizer.clip()

    def _over_ranks(self, values: mx.array | NDArray) -> NDArray:
        return np.array(values, np.float64)
