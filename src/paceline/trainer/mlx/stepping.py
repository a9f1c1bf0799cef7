"""One optimizer step in mlx: micro-batches differentiated one by one, their gradients summed and clipped."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from paceline.config import trainer as config
from paceline.data import MicroBatch
from paceline.model.mlx.loading import MlxModel
from paceline.trainer.loss import NAMES, Sums
from paceline.trainer.mlx.forward import Forward
from paceline.trainer.mlx.optimizer import MlxAdamW
from paceline.trainer.mlx.parameters import named
from paceline.trainer.norms import Outcome
from paceline.trainer.stepping import Stepper, streams_of, trained
from paceline.trainer.tokens import Tokens


class MlxStepper(Stepper):
    """Each micro-batch is computed before the next begins, or the graphs of all would lie in memory at once."""

    def __init__(self, model: MlxModel, c: config.Trainer, forward: Forward, optimizer: MlxAdamW) -> None:
        super().__init__(c, optimizer)
        self._net, self._forward, self._optimizer = model.net, forward, optimizer

    def backward(self, micro_batch: MicroBatch, version: int, first: bool = True) -> Sums:
        if not len(trained(micro_batch)):
            return Sums({})
        if self.watch is not None:
            draws, tokens = self._forward.draws, self.tokens(micro_batch)
            self.watch(micro_batch, tokens, self._loss.judge(tokens))
            self._forward.draws = draws  # the pass that trains draws the same noise

        def scaled(weights: Any) -> tuple[mx.array, dict[str, mx.array]]:
            self._net.update(weights)
            loss, sums = self._loss(self.tokens(micro_batch), version, first)
            return loss * self._optimizer.scale, sums.values

        held = self._net.trainable_parameters()
        try:
            (_, sums), gradients = mx.value_and_grad(scaled)(self._net.trainable_parameters())
        finally:
            self._net.update(held)  # until here the model is made of what is differentiated
        self._optimizer.add(named(gradients))
        mx.eval(sums)
        return Sums(sums)

    def tokens(self, micro_batch: MicroBatch) -> Tokens:
        """The tokens that train, as the policy sees them now."""
        streams = {name: mx.array(stream) for name, stream in streams_of(micro_batch).items()}
        logprobs, entropy = self._forward.logprobs(
            micro_batch, trained(micro_batch), entropy=True, entropy_grad=bool(self._config.entropy_coef)
        )
        assert entropy is not None
        return Tokens(logprobs=logprobs, entropy=entropy, names=micro_batch.names, **streams)

    def _gradient(self, packs: Sequence[MicroBatch], version: int, first: bool) -> Outcome:
        self._net.train()
        try:
            sums = [sums for micro_batch in packs if (sums := self.backward(micro_batch, version, first)).values]
        finally:
            self._net.eval()
        total = np.array(Sums.total(sums), np.float64) if sums else np.zeros(len(NAMES))
        return Outcome(total, self._optimizer.clip(), len(packs))
