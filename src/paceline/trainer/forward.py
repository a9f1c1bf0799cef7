"""Packed samples through a model: hidden states once, log probabilities only where a token trains.

On a GPU sequences attend by FlashAttention, without padding. Elsewhere those of similar length share a padded call, and
common prompts are computed once.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from paceline.data import MicroBatch
from paceline.model import PLAN, Head, PackedPlan, token_logprobs
from paceline.model.attention import Plan
from paceline.model.compiling import compile_blocks
from paceline.model.varlen import VarlenPlan, can_varlen
from paceline.trainer.layout import Layout
from paceline.trainer.prefix import TreePlan, share_prefixes

KEPT = 0.9
"""Share of its activations a compiled layer keeps. At 0.9 it drops what one pointwise pass brings back: a third."""


class Forward:
    """One model's forward pass over micro-batches. Make it before the model is sharded, which hides its type."""

    def __init__(
        self, model: PreTrainedModel, fp32_head: bool = False, compiled: bool = False, again: bool = False
    ) -> None:
        self._decoder = model.get_decoder()
        self._device = model.device
        self._varlen = can_varlen(model)
        self._compile, self._again = compiled, again
        self.head = Head(model, fp32_head)
        self.layout = Layout(model.dtype)

    def send(self, stream: NDArray) -> Tensor:
        """To the model's device. A GPU is not waited for: it is still busy with the micro-batch before."""
        tensor = torch.from_numpy(stream)
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def hidden(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Hidden states, and for each token of the micro-batch the place of its own."""
        if self._compile:  # here and not earlier, because the compiler's settings belong to a thread
            compile_blocks(self._decoder, memory=KEPT, again=self._again)
            self._compile = False
        if self._varlen:
            plan: Plan = VarlenPlan(micro_batch.lengths.tolist(), self._device)
            streams = (micro_batch.token_ids, micro_batch.positions, np.arange(len(micro_batch)))
        else:
            plan, streams = self._trees(micro_batch)
        ids, positions, where = map(self.send, streams)
        out = self._decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, **{PLAN: plan})
        return out.last_hidden_state[0], where

    def _trees(self, micro_batch: MicroBatch) -> tuple[Plan, tuple[NDArray, NDArray, NDArray]]:
        """Common prompts computed once, where padding costs less than computing them again."""
        shared = share_prefixes(micro_batch)
        branched = any(len(tree.branches) > 1 for tree in shared.trees)
        lengths = micro_batch.lengths.tolist()
        plan = TreePlan(shared.trees, self._device) if branched else PackedPlan(lengths, self._device)
        return plan, (shared.token_ids, shared.positions, shared.where)

    def logprobs(
        self, micro_batch: MicroBatch, places: Tensor, entropy: bool = False, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log probabilities of the tokens at `places`, their entropy if asked for (with its gradient too), and a zero
        that hangs on the hidden states: added to a loss it gives every parameter a gradient even when no token trains.
        """
        return self.layout.run(lambda: self._logprobs(micro_batch, places, entropy, entropy_grad))

    def _logprobs(
        self, micro_batch: MicroBatch, places: Tensor, entropy: bool, entropy_grad: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        hidden, where = self.hidden(micro_batch)
        before = hidden.index_select(0, where.index_select(0, places - 1))
        targets, temperatures = (
            self.send(x).index_select(0, places) for x in (micro_batch.token_ids, micro_batch.temperatures)
        )
        values, spread = token_logprobs(self.head, before, targets, temperatures, entropy, entropy_grad)
        return values, spread, (hidden * 0).sum()
