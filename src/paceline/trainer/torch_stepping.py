"""One optimizer step in torch: micro-batches backward, the gradients of all ranks, and clipping."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.config import trainer as config
from paceline.data import MicroBatch, count
from paceline.trainer.forward import Forward
from paceline.trainer.loss import Sums
from paceline.trainer.norms import Outcome
from paceline.trainer.optimizer import MasterAdamW
from paceline.trainer.stepping import Stepper, streams_of, trained
from paceline.trainer.stream import Stream
from paceline.trainer.tokens import Tokens
from paceline.trainer.world import Ranks


class TorchStepper(Stepper):
    """Of several ranks each has micro-batches of its own, and all take the same step."""

    def __init__(
        self, model: PreTrainedModel, c: config.Trainer, forward: Forward, optimizer: MasterAdamW, ranks: Ranks
    ) -> None:
        super().__init__(c, optimizer, ranks.all.total)
        self._model, self._forward, self._optimizer, self._ranks = model, forward, optimizer, ranks

    def feed(self, stream: Stream, packs: Sequence[MicroBatch], version: int) -> None:
        """Add to the sums of a batch that is still being gathered."""
        self._model.train()
        for micro_batch in packs:
            stream.backward(*self.tokens(micro_batch), self._loss, version)
        self._model.eval()

    def finish(self, stream: Stream) -> Outcome | None:
        """The step of a batch that was fed; None where its gradient is not finite, and gone."""
        counted = self._ranks.data.sum(torch.from_numpy(count(stream.samples).ravel()))
        totals = counted.cpu().numpy().reshape(-1, 2)
        outcome = self._summed(stream.finish(totals), stream.micro_batches)
        if outcome.finite:
            return self._taken(outcome, bool(totals.any()))
        self._optimizer.zero()
        return None

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

    def _gradient(self, packs: Sequence[MicroBatch], version: int, first: bool) -> Outcome:
        self._model.train()
        sums = [self.backward(micro_batch, version, first) for micro_batch in packs]
        self._model.eval()
        return self._summed(Sums.total(sums), len(packs))

    def _summed(self, sums: Tensor, micro_batches: int) -> Outcome:
        """All ranks' gradient, clipped."""
        self._ranks.tokens.sum_gradients(self._optimizer.unsummed)
        self._forward.layout.settle(self._optimizer.masters)
        norm = self._optimizer.clip()
        return Outcome(self._ranks.data.sum(sums).cpu().numpy(), float(norm), micro_batches)
