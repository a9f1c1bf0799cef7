"""Slices of sequences by FlashAttention say what padded ones say."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline.model.attention import Scores
from paceline.trainer.torch.forward import ContextShards, SlicedPlan, SlicedVarlenPlan
from paceline.trainer.torch.world import World

LENGTHS, RANKS, DIM = [1, 7, 30, 64, 3, 200], 3, 64


class Known(ContextShards):
    """One rank's shards where all keys and values are here already: no other rank is asked."""

    whole: tuple[Tensor, Tensor]

    def gather(self, k: Tensor, v: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        return self.whole


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [(4, 4), (14, 2)])
def test_slices_attend_as_if_padded(window, heads):
    torch.manual_seed(0)
    given = [torch.randn(sum(LENGTHS), n, DIM, device="cuda") for n in (heads[0], heads[1], heads[1])]
    weight = torch.randn(sum(LENGTHS), heads[0], DIM, device="cuda")
    for rank in range(RANKS):
        results = []
        for make, dtype in ((SlicedVarlenPlan, torch.bfloat16), (SlicedPlan, torch.float32)):
            q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in given)
            shards = Known(cast(World, SimpleNamespace(group=object(), rank=rank, size=RANKS)), LENGTHS)
            shards.whole = k, v
            positions = torch.from_numpy(shards.own_positions).cuda()
            scores = Scores(DIM**-0.5, window)
            out = make(shards, torch.device("cuda")).attend(0, q[positions], k[positions], v[positions], scores)
            (out.float() * weight[positions]).sum().backward()
            results.append([out, q.grad, k.grad, v.grad])
        for fast, exact in zip(*results, strict=True):
            assert (fast.float() - exact).abs().mean() < 0.02 * exact.abs().mean() + 1e-3
