"""Packed samples through a model: hidden states once, log probabilities only where a token trains.

On a GPU sequences attend by FlashAttention, without padding. Elsewhere those of similar length share a padded call, and
common prompts are computed once.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from paceline.data import MicroBatch
from paceline.model import PLAN, LMHead, PackedPlan, token_logprobs
from paceline.model.attention import AttentionPlan
from paceline.model.background_compile import compile_blocks
from paceline.model.varlen import VarlenPlan, can_varlen
from paceline.trainer.context import Cut, SlicedPlan, SlicedVarlenPlan
from paceline.trainer.prefix import TreePlan, share_prefixes
from paceline.trainer.world import RankLayout, World


class ForwardPass:
    """One model's forward pass over micro-batches. Make it before the model is sharded, which hides its type and may
    first bring it to its device."""

    def __init__(
        self,
        model: PreTrainedModel,
        fp32_head: bool = False,
        compiled: bool = False,
        again: bool = False,
        context: World | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._decoder = model.get_decoder()
        self._device = model.device if device is None else device
        self._varlen = can_varlen(model, self._device)
        self.is_compiled, self._compile, self._again = compiled, compiled, again
        self._context = context if context is not None and context.size > 1 else None
        self.head = LMHead(model, fp32_head)
        self.layout = RankLayout(model.dtype)

    def compile(self) -> None:
        """Run compiled layers from the next micro-batch on."""
        self.is_compiled = self._compile = True

    def send(self, stream: NDArray) -> Tensor:
        """To the model's device. A GPU is not waited for: it is still busy with the micro-batch before."""
        tensor = torch.from_numpy(stream)
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def read(
        self, micro_batch: MicroBatch, places: Tensor, of: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The rows that `of` computes from the hidden states before `places`, and a zero that depends on all hidden
        states. It may be given only some of the places: ranks that share sequences ask each other for the rest."""
        cut = None if self._context is None else Cut(self._context, micro_batch.lengths.tolist())
        hidden, where = self._hidden(micro_batch, cut)
        owners, own = (None, places) if cut is None else cut.own(places)
        rows = of(hidden.index_select(0, where.index_select(0, own - 1)), own)
        if cut is not None and owners is not None:
            rows = cut.told(rows, owners)
        return rows, (hidden * 0).sum()

    def _hidden(self, micro_batch: MicroBatch, cut: Cut | None) -> tuple[Tensor, Tensor]:
        """Hidden states, and for each token of the micro-batch, if it is here, the place of its own."""
        if self._compile:  # here and not earlier, because the compiler's settings belong to a thread
            compile_blocks(self._decoder, again=self._again)
            self._compile = False
        if cut is not None:
            plan: AttentionPlan = (SlicedVarlenPlan if self._varlen else SlicedPlan)(cut, self._device)
            streams = (micro_batch.token_ids[cut.places], micro_batch.positions[cut.places], cut.where)
        elif self._varlen:
            plan = VarlenPlan(micro_batch.lengths.tolist(), self._device)
            streams = (micro_batch.token_ids, micro_batch.positions, np.arange(len(micro_batch)))
        else:
            plan, streams = self._trees(micro_batch)
        ids, positions, where = map(self.send, streams)
        out = self._decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, **{PLAN: plan})
        return out.last_hidden_state[0], where

    def _trees(self, micro_batch: MicroBatch) -> tuple[AttentionPlan, tuple[NDArray, NDArray, NDArray]]:
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
        that depends on the hidden states: added to a loss it gives every parameter a gradient even if no token trains.
        """
        return self.layout.run(lambda: self._logprobs(micro_batch, places, entropy, entropy_grad))

    @torch.no_grad()
    def scores(self, micro_batch: MicroBatch) -> NDArray:
        """Log probabilities of the sampled tokens, on the host and without a gradient."""
        values, _, _ = self.logprobs(micro_batch, self.send(micro_batch.loss_mask.nonzero()[0]))
        return values.float().cpu().numpy()

    def _logprobs(
        self, micro_batch: MicroBatch, places: Tensor, entropy: bool, entropy_grad: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        def scores(before: Tensor, own: Tensor) -> Tensor:
            targets, temperatures = (
                self.send(x).index_select(0, own) for x in (micro_batch.token_ids, micro_batch.temperatures)
            )
            values, spread = token_logprobs(self.head, before, targets, temperatures, entropy, entropy_grad)
            return values[:, None] if spread is None else torch.stack((values, spread), 1)

        rows, zero = self.read(micro_batch, places, scores)
        values, *spread = (column.clone() for column in rows.unbind(1))  # FSDP must not hand out views
        return values, spread[0] if spread else None, zero
