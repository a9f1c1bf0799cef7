"""Packed samples through a model: hidden states once, log probabilities only where a token trains.

On a GPU sequences attend by FlashAttention, without padding. Elsewhere those of similar length share a padded call, and
common prompts are computed once.

Context parallelism: the ranks of a group share each sequence, every one with some of its tokens.

All layers but attention look at one token at a time, so a rank runs them over its own tokens alone. For attention it
keeps its own queries and gathers the keys and values of all; in the backward pass what its queries ask of others' keys
goes back to where these came from. Every rank has the token ids of the whole micro-batch, so the log probability of a
token is computed where the token before it lies, and then told to all: each rank sees the scores of whole samples and
makes the same loss of them, of which only its own tokens' part flows back into the model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from paceline.data import MicroBatch
from paceline.data.packing import similar_lengths
from paceline.model import PLAN, LMHead, PackedPlan, token_logprobs
from paceline.model.attention import AttentionPlan, sdpa, window_mask
from paceline.model.background_compile import compile_blocks
from paceline.model.varlen import VarlenPlan, can_varlen
from paceline.trainer.torch.prefix import TreePlan, share_prefixes
from paceline.trainer.torch.world import RankLayout, World

MASKED_POSITION = 1 << 40
"""A position that no query comes after."""
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Their names from torch 2.13 on, and before."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Neighbouring tokens of one sequence: `start` to `end`, counted in it; `at` is where the sequence begins."""

    at: int
    start: int
    end: int


def assign_slices(lengths: Sequence[int], ranks: int) -> list[list[Slice]]:
    """Each rank's slices, in the order of the micro-batch.

    A token's work grows with its position, so a sequence is cut into two slices for each rank, and the one with an
    early slice gets a late one too: of four ranks the first has slices 0 and 7, the last 3 and 4. Who is first changes
    from sequence to sequence, so that many short ones fill all ranks.
    """
    shares: list[list[Slice]] = [[] for _ in range(ranks)]
    at = 0
    for number, length in enumerate(lengths):
        sizes, long = divmod(length, 2 * ranks)
        ends = np.cumsum([sizes + (i < long) for i in range(2 * ranks)]).tolist()
        for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if start < end:
                shares[(min(i, 2 * ranks - 1 - i) + number) % ranks].append(Slice(at, start, end))
        at += length
    return shares


class ContextShards:
    """One micro-batch, and which rank has which of its tokens. A rank without any computes the first once more and
    drops the result: all ranks must run every layer, since they meet in it."""

    def __init__(self, context: World, lengths: Sequence[int]) -> None:
        assert context.group is not None
        self._group, self._rank, self._size = context.group, context.rank, context.size
        shares = assign_slices(lengths, self._size)
        held = [np.concatenate([np.arange(s.at + s.start, s.at + s.end) for s in share] or [[]]) for share in shares]
        self._width = max(map(len, held))
        """Tokens of the fullest rank: gathered parts are all padded to this."""
        self.slices = shares[self._rank] or [Slice(0, 0, 1)]
        own = held[self._rank].astype(int)
        self.own_positions = own if len(own) else np.zeros(1, int)
        """Where in the micro-batch this rank's tokens are."""
        total = int(sum(lengths))
        self._owners, self.order, self.where = (np.zeros(total, int) for _ in range(3))
        for rank, positions in enumerate(held):
            self._owners[positions.astype(int)] = rank
            self.order[positions.astype(int)] = rank * self._width + np.arange(len(positions))
        self.where[own] = np.arange(len(own))

    def gather(self, k: Tensor, v: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values in the order of the micro-batch."""
        both = torch.stack((k, v), 1)
        short = self._width - len(both)
        padded = torch.cat((both, both.new_zeros(short, *both.shape[1:]))) if short else both
        gathered = _Gather.apply(padded, self._group, self._size)
        return gathered.index_select(0, order).unbind(1)

    def own(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of each of some tokens the rank that has the token before it; and those where that is this rank."""
        owners = torch.from_numpy(self._owners).to(positions.device).index_select(0, positions - 1)
        return owners, positions[owners == self._rank]

    def share_rows(self, values: Tensor, owners: Tensor) -> Tensor:
        """A row for each of `owners`, of whom this rank has computed its own."""
        if not len(owners):
            return values
        counted = F.one_hot(owners, self._size).cumsum(0)
        width = int(counted[-1].max())
        padded = torch.cat((values, values.new_zeros(width - len(values), *values.shape[1:])))
        gathered = _Share.apply(padded, self._group, self._rank, self._size)
        slots = owners * width + counted.gather(1, owners[:, None])[:, 0] - 1
        return gathered.index_select(0, slots)


class SlicedPlan:
    """Own queries over the keys of whole sequences, in padded calls with a mask; those of like length share one."""

    def __init__(self, shards: ContextShards, device: torch.device) -> None:
        self._shards = shards
        self._order = torch.from_numpy(shards.order).to(device)
        ends = [one.end for one in shards.slices]
        groups = similar_lengths(ends)
        sizes = [one.end - one.start for one in shards.slices]
        starts = np.cumsum([0, *sizes])
        self._rows = [_QueryRows([shards.slices[i] for i in group], device) for group in groups]
        taken = [np.concatenate([np.arange(starts[i], starts[i + 1]) for i in group]) for group in groups]
        self._taken = [torch.from_numpy(positions).to(device) for positions in taken]
        self._restore = torch.from_numpy(np.argsort(np.concatenate(taken))).to(device)

    @torch.compiler.disable
    def attend(self, layer: int | Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        k, v = self._shards.gather(k, v, self._order)
        parts = zip(self._rows, self._taken, strict=True)
        done = [rows.attend(q.index_select(0, taken), k, v, scale, window) for rows, taken in parts]
        return torch.cat(done).index_select(0, self._restore)


class _QueryRows:
    """Slices as rows of queries, each beside a row of the keys up to its end."""

    def __init__(self, slices: Sequence[Slice], device: torch.device) -> None:
        shape = (len(slices), max(one.end - one.start for one in slices))
        # Padding asks as the first token, which every row has: a query that sees nothing would turn into NaN.
        queries, real = np.zeros(shape, int), np.zeros(shape, bool)
        keys = np.full((len(slices), max(one.end for one in slices)), MASKED_POSITION)
        source = np.zeros(keys.shape, int)
        for row, one in enumerate(slices):
            size = one.end - one.start
            queries[row, :size], real[row, :size] = np.arange(one.start, one.end), True
            keys[row, : one.end], source[row, : one.end] = np.arange(one.end), np.arange(one.at, one.at + one.end)
        self._shape = shape
        self._queries, self._keys = (torch.from_numpy(x).to(device) for x in (queries, keys))
        self._indices = torch.from_numpy(real.ravel().nonzero()[0]).to(device)
        self._source = torch.from_numpy(source).to(device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        padded = q.new_zeros(self._shape[0] * self._shape[1], *q.shape[1:]).index_copy(0, self._indices, q)
        k, v = (x.index_select(0, self._source.ravel()).view(*self._source.shape, *x.shape[1:]) for x in (k, v))
        mask = window_mask(self._queries, self._keys, window)[:, None]
        out = sdpa(padded.view(*self._shape, *q.shape[1:]), k, v, scale, mask)
        return out.reshape(-1, *q.shape[1:]).index_select(0, self._indices)


class SlicedVarlenPlan:
    """The same by FlashAttention, without padding: it lets the last query see the last key, the one before it all but
    one, and so on, which is what a slice at the end of its keys needs."""

    def __init__(self, shards: ContextShards, device: torch.device) -> None:
        self._shards = shards
        self._order = torch.from_numpy(shards.order).to(device)
        sizes, ends = [one.end - one.start for one in shards.slices], [one.end for one in shards.slices]
        self._queries, self._keys = (
            torch.tensor([0, *some], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
            for some in (sizes, ends)
        )
        self._longest = max(sizes), max(ends)
        source = np.concatenate([np.arange(one.at, one.at + one.end) for one in shards.slices])
        self._source = torch.from_numpy(source).to(device)

    @torch.compiler.disable
    def attend(self, layer: int | Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        k, v = (x.index_select(0, self._source) for x in self._shards.gather(k, v, self._order))
        sides = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
        return torch.ops.aten._flash_attention_forward(
            q, k, v, self._queries, self._keys, *self._longest, 0.0, True, False, scale=scale, **sides
        )[0]


def _all_gather(part: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    out = part.new_empty(size * len(part), *part.shape[1:])
    ALL_GATHER(out, part.contiguous(), group=group)
    return out


class _Gather(torch.autograd.Function):
    """All ranks' tokens. Each may be used on every rank, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:  # noqa: ANN001 - torch's contract
        ctx.group, ctx.rows = group, len(part)
        return _all_gather(part, group, size)

    @staticmethod
    def backward(ctx, *grads: Tensor):  # noqa: ANN001, ANN205 - torch's contract
        (grad,) = grads
        own = grad.new_empty(ctx.rows, *grad.shape[1:])
        REDUCE_SCATTER(own, grad.contiguous(), group=ctx.group)
        return own, None, None


class _Share(torch.autograd.Function):
    """All ranks' results, of which all ranks make the same loss: each rank's own gradient is already the whole one."""

    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup, rank: int, size: int) -> Tensor:  # noqa: ANN001
        ctx.own = slice(rank * len(part), (rank + 1) * len(part))
        return _all_gather(part, group, size)

    @staticmethod
    def backward(ctx, *grads: Tensor):  # noqa: ANN001, ANN205 - torch's contract
        return grads[0][ctx.own], None, None, None


class ForwardPass:
    """One model's forward pass over micro-batches. Make it before the model is sharded, which hides its type."""

    def __init__(
        self,
        model: PreTrainedModel,
        fp32_head: bool = False,
        compiled: bool = False,
        retain_graph: bool = False,
        context: World | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._decoder = model.get_decoder()
        self._device = model.device if device is None else device
        self._varlen = can_varlen(model, self._device)
        self.is_compiled, self._compile, self._retain_graph = compiled, compiled, retain_graph
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
        self, micro_batch: MicroBatch, positions: Tensor, of: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The rows that `of` computes from the hidden states before `positions`, and a zero that depends on all hidden
        states. It may be given only some of the positions: ranks that share sequences ask each other for the rest."""
        shards = None if self._context is None else ContextShards(self._context, micro_batch.lengths.tolist())
        hidden, where = self._hidden(micro_batch, shards)
        owners, own = (None, positions) if shards is None else shards.own(positions)
        rows = of(hidden.index_select(0, where.index_select(0, own - 1)), own)
        if shards is not None and owners is not None:
            rows = shards.share_rows(rows, owners)
        return rows, (hidden * 0).sum()

    def _hidden(self, micro_batch: MicroBatch, shards: ContextShards | None) -> tuple[Tensor, Tensor]:
        """Hidden states, and for each token of the micro-batch, if it is here, the place of its own."""
        if self._compile:  # here and not earlier, because the compiler's settings belong to a thread
            compile_blocks(self._decoder, retain_graph=self._retain_graph)
            self._compile = False
        if shards is not None:
            plan: AttentionPlan = (SlicedVarlenPlan if self._varlen else SlicedPlan)(shards, self._device)
            streams = (
                micro_batch.token_ids[shards.own_positions],
                micro_batch.positions[shards.own_positions],
                shards.where,
            )
        elif self._varlen:
            plan = VarlenPlan(micro_batch.lengths.tolist(), self._device)
            streams = (micro_batch.token_ids, micro_batch.positions, np.arange(len(micro_batch)))
        else:
            # Common prompts are computed once, where padding costs less than computing them again.
            shared = share_prefixes(micro_batch)
            branched = any(len(tree.branches) > 1 for tree in shared.trees)
            lengths = micro_batch.lengths.tolist()
            plan = TreePlan(shared.trees, self._device) if branched else PackedPlan(lengths, self._device)
            streams = (shared.token_ids, shared.positions, shared.where)
        ids, positions, where = map(self.send, streams)
        out = self._decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, **{PLAN: plan})
        return out.last_hidden_state[0], where

    def logprobs(
        self, micro_batch: MicroBatch, positions: Tensor, entropy: bool = False, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log probabilities of the tokens at `positions`, their entropy if asked for (with its gradient too), and a
        zero that depends on the hidden states: added to a loss it gives every parameter a gradient even if no token
        trains."""

        def scores(before: Tensor, own: Tensor) -> Tensor:
            targets, temperatures = (
                self.send(x).index_select(0, own) for x in (micro_batch.token_ids, micro_batch.temperatures)
            )
            values, spread = token_logprobs(self.head, before, targets, temperatures, entropy, entropy_grad)
            return values[:, None] if spread is None else torch.stack((values, spread), 1)

        def work() -> tuple[Tensor, Tensor | None, Tensor]:
            rows, zero = self.read(micro_batch, positions, scores)
            values, *spread = (column.clone() for column in rows.unbind(1))  # FSDP must not hand out views
            return values, spread[0] if spread else None, zero

        return self.layout.run(work)

    @torch.no_grad()
    def scores(self, micro_batch: MicroBatch) -> NDArray:
        """Log probabilities of the sampled tokens, on the host and without a gradient."""
        values, _, _ = self.logprobs(micro_batch, self.send(micro_batch.loss_mask.nonzero()[0]))
        return values.float().cpu().numpy()
