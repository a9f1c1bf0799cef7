"""Computes on CUDA what `head.measure` and `head.differentiate_` do elsewhere: each in one read of the logits."""

import torch
import triton  # comes with torch's CUDA builds
import triton.language as tl
from torch import Tensor

BLOCK = 8192


@triton.jit
def _measure(logits, targets, temperatures, logprobs, normalisers, entropies, vocabulary, BLOCK: tl.constexpr):
    """One program a row: its normaliser and its entropy in one pass, rescaled whenever a larger logit appears."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * vocabulary
    inverse = 1.0 / tl.load(temperatures + row)
    most = float("-inf")
    total = 0.0
    weighted = 0.0
    for at in range(0, vocabulary, BLOCK):
        column = at + tl.arange(0, BLOCK)
        inside = column < vocabulary
        x = tl.load(base + column, inside, float("-inf")).to(tl.float32) * inverse
        higher = tl.maximum(most, tl.max(x, 0))
        fade = tl.exp(most - higher)
        p = tl.exp(x - higher)
        total = total * fade + tl.sum(p, 0)
        weighted = weighted * fade + tl.sum(tl.where(inside, p * x, 0.0), 0)
        most = higher
    normaliser = most + tl.log(total)
    chosen = tl.load(base + tl.load(targets + row)).to(tl.float32) * inverse
    tl.store(logprobs + row, chosen - normaliser)
    tl.store(normalisers + row, normaliser)
    tl.store(entropies + row, normaliser - weighted / total)


@triton.jit
def _differentiate(
    logits, targets, temperatures, normalisers, entropies, by_logprob, by_entropy, vocabulary, BLOCK: tl.constexpr
):
    """g (1[target] - p) - h p (log p + H), over the temperature."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    place = logits + row.to(tl.int64) * vocabulary + column
    inverse = 1.0 / tl.load(temperatures + row)
    logp = tl.load(place, inside, 0.0).to(tl.float32) * inverse - tl.load(normalisers + row)
    p = tl.exp(logp)
    hit = (column == tl.load(targets + row)).to(tl.float32)
    d = tl.load(by_logprob + row) * (hit - p) - tl.load(by_entropy + row) * p * (logp + tl.load(entropies + row))
    tl.store(place, (d * inverse).to(logits.dtype.element_ty), inside)


def measure(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocabulary = logits.shape
    out = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _measure[(rows,)](logits, targets, temperatures, *out, vocabulary, BLOCK=BLOCK, num_warps=16)
    return out[0], out[1], out[2]


def differentiate_(
    logits: Tensor, targets: Tensor, temperatures: Tensor, normalisers: Tensor, entropies: Tensor, by_logprob: Tensor,
    by_entropy: Tensor,
) -> Tensor:  # fmt: skip
    rows, vocabulary = logits.shape
    grid = (rows, triton.cdiv(vocabulary, BLOCK))
    _differentiate[grid](
        logits, targets, temperatures, normalisers, entropies, by_logprob, by_entropy, vocabulary, BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip
    return logits
