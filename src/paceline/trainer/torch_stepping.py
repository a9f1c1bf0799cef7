"""One optimizer step in torch: micro-batches backward, the gradients of all ranks, and clipping."""

import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from paceline.config import trainer as config
from paceline.data import MicroBatch
from paceline.trainer.forward import Forward
from paceline.trainer.loss import Sums
from paceline.trainer.optimizer import MasterAdamW
from paceline.trainer.stepping import Stepper, streams_of, trained
from paceline.trainer.stream import Stream, component, components
from paceline.trainer.tokens import Tokens
from paceline.trainer.world import Ranks


class TorchStepper(Stepper):
    """Of several ranks each has micro-batches of its own, and all take the same step."""

    def __init__(
        self, model: PreTrainedModel, c: config.Trainer, forward: Forward, optimizer: MasterAdamW, ranks: Ranks
    ) -> None:
        super().__init__(c, model, optimizer, ranks.all.total)
        self._forward, self._optimizer, self._ranks = forward, optimizer, ranks

    def backward(self, micro_batch: MicroBatch, version: int, first: bool = True) -> Sums:
        """Add one micro-batch's gradient."""
        tokens, anchor = self.tokens(micro_batch)
        loss, sums = self._loss(tokens, version, first)
        if self.watch is not None:
            with torch.no_grad():
                self.watch(micro_batch, tokens, self._loss.judge(tokens))
        self._optimizer.backward(loss, anchor)
        return sums

    def tokens(self, micro_batch: MicroBatch) -> tuple[Tokens, Tensor]:
        """The tokens that train, as the policy sees them now; and the forward pass's zero."""
        streams = {name: self._forward.send(stream) for name, stream in streams_of(micro_batch).items()}
        logprobs, entropy, anchor = self._forward.logprobs(
            micro_batch,
            self._forward.send(trained(micro_batch)),
            entropy=True,
            entropy_grad=bool(self._config.entropy_coef),
        )
        assert entropy is not None
        return Tokens(logprobs=logprobs, entropy=entropy, names=micro_batch.names, **streams), anchor

    def _add(self, stream: Stream, micro_batch: MicroBatch, version: int) -> Sums:
        tokens, anchor = self.tokens(micro_batch)
        parts, sums = self._loss.parts(tokens, version)
        held = components(micro_batch)
        for name in held:
            with stream.summing(name):
                self._optimizer.backward(component(parts, name), anchor, again=name != held[-1])
        return sums

    def _clip(self) -> Tensor:
        self._ranks.tokens.sum_gradients(self._optimizer.unsummed)
        self._forward.layout.settle(self._optimizer.masters)
        return self._optimizer.clip()

    def _over_ranks(self, values: Tensor | NDArray) -> NDArray:
        return self._ranks.data.sum(torch.as_tensor(values)).cpu().numpy()
