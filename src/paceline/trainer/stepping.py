"""One optimizer step of the policy: micro-batches backward, the gradients of all ranks, clipping, and a verdict."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from paceline.config import trainer as config
from paceline.data import MicroBatch, count
from paceline.trainer.forward import Forward
from paceline.trainer.loss import Judged, Loss, Sums
from paceline.trainer.norms import Norms, Outcome
from paceline.trainer.optimizer import MasterAdamW
from paceline.trainer.stream import Stream
from paceline.trainer.tokens import Tokens
from paceline.trainer.world import Ranks

STREAMS = ("versions", "advantages", "ref_logprobs", "base_logprobs", "prox_logprobs")
SCALES = ("rl_scale", "ce_scale", "ref_kl_scale", "policy_scale")


def trained(micro_batch: MicroBatch) -> NDArray:
    """Places of the tokens that any component trains."""
    return np.logical_or.reduce([getattr(micro_batch, name) != 0 for name in SCALES]).nonzero()[0]


class Stepper:
    """Turns micro-batches into a step, which is taken or left out."""

    def __init__(
        self, model: PreTrainedModel, c: config.Trainer, forward: Forward, optimizer: MasterAdamW, ranks: Ranks
    ) -> None:
        self._model, self._config, self._forward, self._optimizer, self._ranks = model, c, forward, optimizer, ranks
        self._loss = Loss(c)
        self.norms = Norms(c.spike, ranks.all)
        self.watch: Callable[[MicroBatch, Tokens, Judged], None] | None = None
        """Told of every micro-batch of a step what each of its tokens says; `paceline replay` looks on."""

    def step(self, packs: Sequence[MicroBatch], version: int, first: bool, trains: bool) -> Outcome:
        """From scratch. `trains` says whether any token of any rank does."""
        outcome = self._gradient(packs, version, first)
        while not outcome.finite and self._optimizer.retreat(bool(outcome.sums.isfinite().all())):
            outcome = self._gradient(packs, version, first)
        return self._taken(outcome, trains)

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
        places = trained(micro_batch)
        owners = np.repeat(np.arange(len(micro_batch.lengths)), micro_batch.lengths)
        streams = {name: getattr(micro_batch, name) for name in (*STREAMS, *SCALES)}
        streams |= {"behaviour": micro_batch.logprobs, "segments": owners}
        at = {name: self._forward.send(stream[places]) for name, stream in streams.items()}
        logprobs, entropy, anchor = self._forward.logprobs(
            micro_batch,
            self._forward.send(places),
            entropy=True,
            entropy_grad=bool(self._config.entropy_coef),
        )
        assert entropy is not None
        return Tokens(logprobs=logprobs, entropy=entropy, names=micro_batch.names, **at), anchor

    def _gradient(self, packs: Sequence[MicroBatch], version: int, first: bool) -> Outcome:
        self._model.train()
        sums = [self.backward(micro_batch, version, first) for micro_batch in packs]
        self._model.eval()
        return self._summed(Sums.total(sums), len(packs))

    def _summed(self, sums: Tensor, micro_batches: int) -> Outcome:
        """All ranks' gradient, clipped."""
        self._ranks.tokens.sum_gradients(self._optimizer.unsummed)
        self._forward.layout.settle(self._optimizer.masters)
        return Outcome(self._ranks.data.sum(sums), float(self._optimizer.clip()), micro_batches)

    def _taken(self, outcome: Outcome, trains: bool) -> Outcome:
        """Step, or leave a bad step out. Where nothing trains on any rank there is no step: AdamW would take most of
        its last one again."""
        trouble = self.norms.trouble(outcome)
        if trouble or not trains:
            self._optimizer.zero()
        else:
            self._optimizer.step()
            self.norms.add(outcome.grad_norm)
        return replace(outcome, trouble=trouble)
