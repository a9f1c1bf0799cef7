"""Packed samples through a model: hidden states once, log probabilities only where a token trains."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.data import MicroBatch
from paceline.model import PLAN, Head, PackedPlan, token_logprobs
from paceline.trainer.prefix import TreePlan, share_prefixes


class Forward:
    """One model's forward pass over micro-batches. Common prompts are computed once."""

    def __init__(self, model: PreTrainedModel, fp32_head: bool = False) -> None:
        self._decoder = model.get_decoder()
        self._device = model.device
        self.head = Head(model, fp32_head)

    def hidden(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Hidden states, and for each token of the micro-batch the place of its own."""
        shared = share_prefixes(micro_batch)
        branched = any(len(tree.branches) > 1 for tree in shared.trees)
        lengths = micro_batch.lengths.tolist()
        plan = TreePlan(shared.trees, self._device) if branched else PackedPlan(lengths, self._device)
        ids, positions, where = (
            torch.from_numpy(x).to(self._device) for x in (shared.token_ids, shared.positions, shared.where)
        )
        out = self._decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, **{PLAN: plan})
        return out.last_hidden_state[0], where

    def logprobs(
        self, micro_batch: MicroBatch, places: Tensor, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log probabilities of the tokens at `places`, their entropy without gradient if asked for, and a zero that
        hangs on the hidden states: added to a loss it gives every parameter a gradient even when no token trains."""
        hidden, where = self.hidden(micro_batch)
        before = hidden.index_select(0, where.index_select(0, places - 1))
        targets, temperatures = (
            torch.from_numpy(x).to(self._device).index_select(0, places)
            for x in (micro_batch.token_ids, micro_batch.temperatures)
        )
        values, spread = token_logprobs(self.head, before, targets, temperatures, entropy=entropy)
        return values, spread, (hidden * 0).sum()
