"""Packed samples through a model: hidden states once, log probabilities only where a token trains.

On a GPU sequences attend by FlashAttention, without padding. Elsewhere those of similar length share a padded call, and
common prompts are computed once.

Common prompts: a token's hidden state depends only on the tokens before it, so samples that begin alike can share the
states of that beginning exactly, gradient included. A group becomes a tree: the common prefix is its trunk, each
sample's rest a branch that sees the trunk and itself, and no other branch.

Context parallelism: the ranks of a group share each sequence, every one with some of its tokens.

All layers but attention look at one token at a time, so a rank runs them over its own tokens alone. For attention it
keeps its own queries and gathers the keys and values of all; in the backward pass what its queries ask of others' keys
goes back to where these came from. Every rank has the token ids of the whole micro-batch, so the log probability of a
token is computed where the token before it lies, and then told to all: each rank sees the scores of whole samples and
makes the same loss of them, of which only its own tokens' part flows back into the model.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from paceline.data import MicroBatch
from paceline.data.packing import similar_lengths
from paceline.model import LMHead, PackedPlan, hidden_states, token_logprobs
from paceline.model.attention import (
    AttentionPlan,
    Mixer,
    PaddedBucket,
    Scores,
    UnsupportedModel,
    VarlenPlan,
    sdpa,
    window_mask,
    window_sizes,
)
from paceline.model.background_compile import compile_blocks
from paceline.model.states import mixers
from paceline.model.support import cache_shape, can_varlen
from paceline.trainer.torch.optimizer import RankLayout
from paceline.trainer.torch.world import World

WASTE = 2.0
"""A tree attends with a mask, over all its branches at once. Past this factor of extra attention it does not pay."""
MASKED_POSITION = 1 << 40
"""A position that no query comes after."""
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Their names from torch 2.13 on, and before."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Samples that share their first `trunk` tokens; `branches` are the lengths of their rests."""

    trunk: int
    branches: tuple[int, ...]

    def __len__(self) -> int:
        return self.trunk + sum(self.branches)

    def positions(self) -> NDArray:
        rests = (np.arange(self.trunk, self.trunk + n) for n in self.branches)
        return np.concatenate([np.arange(self.trunk), *rests])


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """A micro-batch with its common prefixes stored once."""

    token_ids: NDArray
    positions: NDArray
    trees: list[Tree]
    where: NDArray
    """For each token of the micro-batch, where its hidden state is found."""


def share_prefixes(batch: MicroBatch) -> SharedPrefixes:
    """Store each common prefix of neighbouring samples once, where that saves work."""
    starts = np.concatenate([[0], np.cumsum(batch.lengths)])
    samples = [batch.token_ids[a:b] for a, b in pairwise(starts)]
    tokens, trees, where = [], [], []
    at = 0
    for run in _runs(samples):
        first, *others = (samples[i] for i in run)
        trunk = min((_common_prefix(first, other) for other in others), default=len(first))
        tree = Tree(trunk, tuple(len(samples[i]) - trunk for i in run))
        for i, length in zip(run, tree.branches, strict=True):
            rest = at + tree.trunk + sum(tree.branches[: i - run[0]])
            where.append(np.concatenate([np.arange(at, at + tree.trunk), np.arange(rest, rest + length)]))
            tokens.append(samples[i][tree.trunk :] if i > run[0] else samples[i])
        trees.append(tree)
        at += len(tree)
    positions = np.concatenate([tree.positions() for tree in trees])
    return SharedPrefixes(np.concatenate(tokens), positions, trees, np.concatenate(where))


def _runs(samples: Sequence[NDArray]) -> list[list[int]]:
    """Neighbours whose tree is worth building, greedily; most runs hold one sample."""
    runs: list[list[int]] = []
    trunk = 0
    for i, sample in enumerate(samples):
        joined = min(trunk, _common_prefix(samples[runs[-1][0]], sample)) if runs else 0
        lengths = [len(samples[j]) for j in (runs[-1] if runs else [])] + [len(sample)]
        tree = sum(lengths) - joined * (len(lengths) - 1)
        if 2 * joined > min(lengths) and tree**2 <= WASTE * sum(length**2 for length in lengths):
            runs[-1].append(i)
            trunk = joined
        else:
            runs.append([i])
            trunk = len(sample)
    return runs


def _common_prefix(a: NDArray, b: NDArray) -> int:
    short = min(len(a), len(b))
    same = a[:short] == b[:short]
    return short if same.all() else int(same.argmin())


class _TreeBucket(PaddedBucket):
    """Trees padded to the largest: each token sees its own branch and the trunk, up to itself."""

    def __init__(
        self, trees: Sequence[Tree], members: list[int], lengths: list[int], device: torch.device | str
    ) -> None:
        super().__init__(members, lengths, device)
        # Padding has a branch of its own and sees only itself: a row that sees nothing would turn into NaN.
        positions = np.tile(np.arange(self.width), (self.rows, 1))
        branches = np.full((self.rows, self.width), -2)  # and the trunk -1
        for row, tree in enumerate(trees[i] for i in members):
            positions[row, : len(tree)] = tree.positions()
            branches[row, : tree.trunk] = -1
            branches[row, tree.trunk : len(tree)] = np.repeat(np.arange(len(tree.branches)), tree.branches)
        self._positions, self._branches = (torch.from_numpy(x).to(device) for x in (positions, branches))
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def mask(self, window: int | None, q: Tensor) -> Tensor:
        if (window, q.dtype) not in self._masks:
            here, there = self._branches[:, :, None], self._branches[:, None, :]
            seen = window_mask(self._positions, self._positions, window) & ((there == -1) | (here == there))
            mask = torch.zeros(seen.shape, dtype=q.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self._masks[window, q.dtype] = mask[:, None]
        return self._masks[window, q.dtype]


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
        gathered = _AllGather.apply(padded, self._group, self._rank, self._size, True)
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
        gathered = _AllGather.apply(padded, self._group, self._rank, self._size, False)
        slots = owners * width + counted.gather(1, owners[:, None])[:, 0] - 1
        return gathered.index_select(0, slots)


WHOLE_ONLY = "{} need whole sequences: set trainer.parallel.context = 1"


def _check_slices(model: PreTrainedModel) -> None:
    """Refuse layers that cannot compute a part of a sequence, or hand over keys and values in one piece."""
    shape = cache_shape(model)
    if shape.states:
        raise UnsupportedModel(WHOLE_ONLY.format("layers with states"))
    if any(layer.key_dim != layer.value_dim for layer in shape.attention.values()):
        raise UnsupportedModel(WHOLE_ONLY.format("keys and values of different widths"))


class SlicedPlan:
    """Own queries over the keys of whole sequences, in padded calls with a mask; those of like length share one."""

    def __init__(self, shards: ContextShards, device: torch.device) -> None:
        self._shards = shards
        self._order = torch.from_numpy(shards.order).to(device)
        groups = similar_lengths([one.end for one in shards.slices])
        self._buckets = [_QueryBucket(group, shards.slices, device) for group in groups]
        self._restore = torch.cat([bucket.tokens for bucket in self._buckets]).argsort()

    @torch.compiler.disable
    def attend(self, layer: int | Tensor, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        k, v = self._shards.gather(k, v, self._order)
        done = [one.attend(q.index_select(0, one.tokens), k, v, scores) for one in self._buckets]
        return torch.cat(done).index_select(0, self._restore)

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        raise AssertionError  # `_check_slices`


class _QueryBucket(PaddedBucket):
    """Slices as rows of queries, each beside a row of the keys up to its end."""

    def __init__(self, members: list[int], slices: Sequence[Slice], device: torch.device) -> None:
        super().__init__(members, [one.end - one.start for one in slices], device)
        # Padding asks as the first token, which every row has: a query that sees nothing would turn into NaN.
        queries = np.zeros((self.rows, self.width), int)
        keys = np.full((self.rows, max(slices[i].end for i in members)), MASKED_POSITION)
        source = np.zeros(keys.shape, int)
        for row, one in enumerate(slices[i] for i in members):
            queries[row, : one.end - one.start] = np.arange(one.start, one.end)
            keys[row, : one.end], source[row, : one.end] = np.arange(one.end), np.arange(one.at, one.at + one.end)
        self._queries, self._keys, self._source = (torch.from_numpy(x).to(device) for x in (queries, keys, source))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        k, v = (x.index_select(0, self._source.ravel()).view(*self._source.shape, *x.shape[1:]) for x in (k, v))
        mask = window_mask(self._queries, self._keys, scores.window)[:, None]
        return self.unpad(sdpa(self.pad(q), k, v, scores, mask))


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
    def attend(self, layer: int | Tensor, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        k, v = (x.index_select(0, self._source) for x in self._shards.gather(k, v, self._order))
        return torch.ops.aten._flash_attention_forward(
            q, k, v, self._queries, self._keys, *self._longest, 0.0, True, False, scale=scores.scale,
            **window_sizes(scores.window),
        )[0]  # fmt: skip

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        raise AssertionError  # `_check_slices`


class _AllGather(torch.autograd.Function):
    """All ranks' parts. Where each may be used on every rank its gradient is the sum of theirs (`summed`). Where all
    ranks make the same loss of them each rank's own gradient is already the whole one."""

    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup, rank: int, size: int, summed: bool) -> Tensor:  # noqa: ANN001
        ctx.group, ctx.summed, ctx.own = group, summed, slice(rank * len(part), (rank + 1) * len(part))
        out = part.new_empty(size * len(part), *part.shape[1:])
        ALL_GATHER(out, part.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, *grads: Tensor):  # noqa: ANN001, ANN205 - torch's contract
        (grad,) = grads
        own = grad[ctx.own]
        if ctx.summed:
            own = grad.new_empty(own.shape)
            REDUCE_SCATTER(own, grad.contiguous(), group=ctx.group)
        return own, None, None, None, None


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
        self._keeps_states = any(True for _ in mixers(model))
        self.is_compiled = self._compile = compiled and not self._keeps_states
        self._retain_graph = retain_graph
        self._context = context if context is not None and context.size > 1 else None
        if self._context is not None:
            _check_slices(model)
        self.head = LMHead(model, fp32_head)
        self.layout = RankLayout(model.dtype)

    def of_copy(self, model: PreTrainedModel, layout: RankLayout, compiled: bool) -> "ForwardPass":
        """The same for a copy of the model, of which only hidden states are asked."""
        other = copy(self)
        other._decoder, other.layout = model.get_decoder(), layout
        other.is_compiled = other._compile = compiled
        return other

    def compile(self) -> None:
        """Run compiled layers from the next micro-batch on; layers with states ask the plan while they run, and stay as
        they are."""
        self.is_compiled = self._compile = not self._keeps_states

    def send(self, stream: NDArray) -> Tensor:
        """To the model's device. A GPU is not waited for: it is still busy with the micro-batch before."""
        tensor = torch.from_numpy(stream)
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def read(
        self, micro_batch: MicroBatch, positions: Tensor, project: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The rows that `project` computes from the hidden states before `positions`, and a zero that depends on all
        hidden states. It may be given only some of the positions: ranks that share sequences ask each other for the
        rest."""
        shards = None if self._context is None else ContextShards(self._context, micro_batch.lengths.tolist())
        hidden, where = self._hidden(micro_batch, shards)
        owners, own = (None, positions) if shards is None else shards.own(positions)
        rows = project(hidden.index_select(0, where.index_select(0, own - 1)), own)
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
            own = shards.own_positions
            streams = (micro_batch.token_ids[own], micro_batch.positions[own], shards.where)
        elif self._varlen or self._keeps_states:  # which have no branches
            plan = (VarlenPlan if self._varlen else PackedPlan)(micro_batch.lengths.tolist(), self._device)
            streams = (micro_batch.token_ids, micro_batch.positions, np.arange(len(micro_batch)))
        else:
            # Common prompts are computed once, where padding costs less than computing them again.
            shared = share_prefixes(micro_batch)
            branched = any(len(tree.branches) > 1 for tree in shared.trees)
            bucket = partial(_TreeBucket, shared.trees) if branched else PaddedBucket
            plan = PackedPlan([len(tree) for tree in shared.trees], self._device, bucket)
            streams = (shared.token_ids, shared.positions, shared.where)
        ids, positions, where = map(self.send, streams)
        return hidden_states(self._decoder, ids, positions, plan), where

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
            values, entropies = token_logprobs(self.head, before, targets, temperatures, entropy, entropy_grad)
            return values[:, None] if entropies is None else torch.stack((values, entropies), 1)

        def work() -> tuple[Tensor, Tensor | None, Tensor]:
            rows, zero = self.read(micro_batch, positions, scores)
            values, *entropies = (column.clone() for column in rows.unbind(1))  # FSDP must not hand out views
            return values, entropies[0] if entropies else None, zero

        return self.layout.run_forward(work)

    @torch.no_grad()
    def scores(self, micro_batch: MicroBatch) -> NDArray:
        """Log probabilities of the sampled tokens, on the host and without a gradient."""
        values, _, _ = self.logprobs(micro_batch, self.send(micro_batch.loss_mask.nonzero()[0]))
        return values.float().cpu().numpy()
