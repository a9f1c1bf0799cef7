"""The sampler as two Triton kernels: one pass over the logits, then one block of them per row.

The same draw as `cpu.sampler.sample`: one uniform number per token, inverted through the cumulative distribution,
blocks first. Reading the logits once, in their own type, is what makes a vocabulary of 150,000 cheap.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.weights.cuda_bits import mix_triton

BLOCK = 2048


@triton.jit
def _measure(logits, temperatures, most, mass, best, vocabulary, blocks, BLOCK: tl.constexpr):
    """Largest scaled logit of a block, where it is, and the block's mass relative to it."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row).to(tl.float32)
    temperature = tl.where(temperature == 0, 1.0, temperature)
    x = tl.load(logits + row.to(tl.int64) * vocabulary + token, token < vocabulary, float("-inf")).to(tl.float32)
    x = x / temperature
    top, where = tl.max(x, 0, return_indices=True)
    place = row * blocks + block
    tl.store(most + place, top)
    tl.store(best + place, where + block * BLOCK)
    tl.store(mass + place, tl.sum(tl.exp(x - top), 0))


@triton.jit
def _draw(
    logits, temperatures, keys, indices, slots, most, mass, best, tokens, logprobs, last, vocabulary, blocks,
    BLOCK: tl.constexpr, BLOCKS_UP: tl.constexpr,
):  # fmt: skip
    """Pick the block, then the token inside it; tell the next step through `last`."""
    row = tl.program_id(0)
    given = tl.load(temperatures + row).to(tl.float32)
    temperature = tl.where(given == 0, 1.0, given)
    block = tl.arange(0, BLOCKS_UP)
    there = block < blocks
    tops = tl.load(most + row * blocks + block, there, float("-inf"))
    top = tl.max(tops, 0)
    weights = tl.load(mass + row * blocks + block, there, 0.0).to(tl.float64) * tl.exp(tops - top).to(tl.float64)
    total = tl.sum(weights, 0)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    index = tl.load(indices + row).to(tl.uint64, bitcast=True)
    u = (mix_triton(key ^ mix_triton(index)) >> 11).to(tl.float64) * 1.1102230246251565e-16
    # Just under the total, so that rounding never picks a weightless last entry.
    target = tl.minimum(u * total, total * (1 - 1e-12))
    sums = tl.cumsum(weights, 0)
    chosen = tl.minimum(tl.sum((sums <= target).to(tl.int32), 0), blocks - 1)
    rest = target - tl.sum(tl.where(block < chosen, weights, 0.0), 0)
    token = chosen * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * vocabulary + token, token < vocabulary, float("-inf")).to(tl.float32)
    x = x / temperature
    p = tl.exp(x - top).to(tl.float64)
    inner_sums = tl.cumsum(p, 0)
    rest = tl.minimum(rest, tl.max(inner_sums, 0) * (1 - 1e-12))
    inside = tl.minimum(tl.sum((inner_sums <= rest).to(tl.int32), 0), BLOCK - 1)
    picked = tl.minimum(chosen * BLOCK + inside, vocabulary - 1)
    # Both are held inside their bounds: where logits are NaN, padding may win, and the host is yet to see it.
    _, winner = tl.max(tops, 0, return_indices=True)
    greedy = tl.load(best + row * blocks + tl.minimum(winner, blocks - 1))
    picked = tl.maximum(tl.minimum(tl.where(given == 0, greedy, picked), vocabulary - 1), 0)
    raw = tl.load(logits + row.to(tl.int64) * vocabulary + picked).to(tl.float32) / temperature
    tl.store(tokens + row, picked.to(tl.int64))
    tl.store(logprobs + row, (raw - top - tl.log(total).to(tl.float32)).to(logprobs.dtype.element_ty))
    tl.store(last + tl.load(slots + row), picked.to(tl.int64))


def sample_into(
    logits: Tensor, temperatures: Tensor, keys: Tensor, indices: Tensor, slots: Tensor,
    tokens: Tensor, logprobs: Tensor, last: Tensor,
) -> None:  # fmt: skip
    """Sample every row of `logits` into `tokens` and `logprobs`, and leave each token in `last[slot]`."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    most, mass = (torch.empty(rows, blocks, dtype=torch.float32, device=logits.device) for _ in range(2))
    best = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    _measure[(rows, blocks)](logits, temperatures, most, mass, best, vocabulary, blocks, BLOCK=BLOCK, num_warps=4)
    _draw[(rows,)](
        logits, temperatures, keys, indices, slots, most, mass, best, tokens, logprobs, last, vocabulary, blocks,
        BLOCK=BLOCK, BLOCKS_UP=triton.next_power_of_2(blocks), num_warps=4,
    )  # fmt: skip
