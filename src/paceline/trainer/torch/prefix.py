"""Computes common prompts once: samples of one group share their first tokens and hidden states.

A token's hidden state depends only on the tokens before it, so samples that begin alike can share the states of that
beginning exactly, gradient included. A group becomes a tree: the common prefix is its trunk, each sample's rest a
branch that sees the trunk and itself, and no other branch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data import MicroBatch
from paceline.data.packing import similar_lengths
from paceline.model.attention import sdpa, window_mask

WASTE = 2.0
"""A tree attends with a mask, over all its branches at once. Past this factor of extra attention it does not pay."""


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
        if runs and _saves_work(joined, [len(samples[j]) for j in runs[-1]] + [len(sample)]):
            runs[-1].append(i)
            trunk = joined
        else:
            runs.append([i])
            trunk = len(sample)
    return runs


def _saves_work(trunk: int, lengths: list[int]) -> bool:
    tree = sum(lengths) - trunk * (len(lengths) - 1)
    return 2 * trunk > min(lengths) and tree**2 <= WASTE * sum(length**2 for length in lengths)


def _common_prefix(a: NDArray, b: NDArray) -> int:
    """Length of the common beginning."""
    short = min(len(a), len(b))
    same = a[:short] == b[:short]
    return short if same.all() else int(same.argmin())


class TreePlan:
    """Attention over trees: each token sees its own branch and the trunk, up to itself."""

    def __init__(self, trees: Sequence[Tree], device: torch.device | str) -> None:
        lengths = [len(tree) for tree in trees]
        self._buckets = [_TreeBucket([trees[i] for i in group], device) for group in similar_lengths(lengths)]
        starts = np.cumsum([0, *lengths])
        order = np.concatenate([np.arange(starts[i], starts[i + 1]) for g in similar_lengths(lengths) for i in g])
        self._order = torch.from_numpy(order).to(device)
        self._restore = torch.from_numpy(np.argsort(order)).to(device)
        self._sizes = [bucket.tokens for bucket in self._buckets]

    def attend(self, layer: int | Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        if len(self._buckets) == 1:
            return self._buckets[0].attend(q, k, v, scale, window)
        parts = zip(*(x.index_select(0, self._order).split(self._sizes) for x in (q, k, v)), strict=True)
        out = [bucket.attend(*part, scale, window) for bucket, part in zip(self._buckets, parts, strict=True)]
        return torch.cat(out).index_select(0, self._restore)


class _TreeBucket:
    """Trees padded to the largest, with the mask that keeps branches apart."""

    def __init__(self, trees: Sequence[Tree], device: torch.device | str) -> None:
        self.tokens = sum(map(len, trees))
        self._shape = (len(trees), max(map(len, trees)))
        # Padding has a branch of its own and sees only itself: a row that sees nothing would turn into NaN.
        positions = np.tile(np.arange(self._shape[1]), (len(trees), 1))
        branches = np.full(self._shape, -2)  # and the trunk -1
        for row, tree in enumerate(trees):
            positions[row, : len(tree)] = tree.positions()
            branches[row, : tree.trunk] = -1
            branches[row, tree.trunk : len(tree)] = np.repeat(np.arange(len(tree.branches)), tree.branches)
        self._positions, self._branches = (torch.from_numpy(x).to(device) for x in (positions, branches))
        self._indices = (self._branches.flatten() != -2).nonzero()[:, 0]
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        out = sdpa(self._pad(q), self._pad(k), self._pad(v), scale, self._mask(window, q.dtype))
        return out.reshape(-1, *q.shape[1:]).index_select(0, self._indices)

    def _pad(self, x: Tensor) -> Tensor:
        padded = x.new_zeros(self._shape[0] * self._shape[1], *x.shape[1:]).index_copy(0, self._indices, x)
        return padded.view(*self._shape, *x.shape[1:])

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if (window, dtype) not in self._masks:
            here, there = self._branches[:, :, None], self._branches[:, None, :]
            seen = window_mask(self._positions, self._positions, window) & ((there == -1) | (here == there))
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self._masks[window, dtype] = mask[:, None]
        return self._masks[window, dtype]
