"""Log probabilities of a linear head's targets, without ever keeping its logits.

Forward, a few thousand rows of logits at a time are reduced to three numbers a row. Backward, the same logits are
computed once more and turned in place into their own gradient:

    d logprob / d logits = (1[target] - p) / T        d entropy / d logits = -p (log p + H) / T
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

ELEMENTS = {"cuda": 1 << 29, "cpu": 1 << 25}
"""Most logits held at once: 1 GiB in bfloat16 on a GPU, 128 MiB in float32 elsewhere."""


def scored(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Log probability and entropy of each row, both differentiable."""
    logprobs, entropies = _Scored.apply(hidden, weight, targets, temperatures)
    return logprobs, entropies


def measure(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log probability of each row's target, the row's normaliser, and its entropy."""
    if logits.device.type == "cuda":
        from paceline.model import cuda_head

        return cuda_head.measure(logits, targets, temperatures)
    x = logits.to(temperatures.dtype) / temperatures[:, None]
    normalisers = x.logsumexp(-1)
    mean = ((x - normalisers[:, None]).exp() * x).sum(-1)
    return x.gather(-1, targets[:, None])[:, 0] - normalisers, normalisers, normalisers - mean


def differentiate_(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor,
) -> Tensor:
    """Logits turned in place into the gradient with respect to them."""
    if logits.device.type == "cuda":
        from paceline.model import cuda_head

        return cuda_head.differentiate_(logits, targets, temperatures, normalisers, entropies, by_logprob, by_entropy)
    logp = logits.to(temperatures.dtype) / temperatures[:, None] - normalisers[:, None]
    p = logp.exp()
    grad = -p * (by_logprob[:, None] + by_entropy[:, None] * (logp + entropies[:, None]))
    grad.scatter_add_(-1, targets[:, None], by_logprob[:, None])
    return logits.copy_(grad / temperatures[:, None])


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor):  # noqa: ANN001, ANN205
        rows = max(1, ELEMENTS[hidden.device.type] // weight.shape[0])
        chunks = zip(hidden.split(rows), targets.split(rows), temperatures.split(rows), strict=True)
        done = [measure(linear(h, weight), t, temperature) for h, t, temperature in chunks]
        logprobs, normalisers, entropies = (torch.cat(column) for column in zip(*done, strict=True))
        ctx.save_for_backward(hidden, weight, targets, temperatures, normalisers, entropies)
        ctx.rows = rows
        return logprobs, entropies

    @staticmethod
    def backward(ctx, *grads: Tensor):  # noqa: ANN001, ANN205
        hidden, weight, *streams = ctx.saved_tensors
        grads = tuple(grad.contiguous() for grad in grads)  # a sum's gradient is one number, expanded
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        places = zip(*(x.split(ctx.rows) for x in (hidden, grad_hidden, *streams, *grads)), strict=True)
        for here, out, *given in places:
            logits = differentiate_(linear(here, weight), *given)
            torch.mm(logits, weight, out=out)
            if ctx.needs_input_grad[1]:
                part = _product32(logits.t(), here)
                grad_weight = part if grad_weight is None else grad_weight.add_(part)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _product32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 at least: sums over chunks are not to be rounded to half precision in between."""
    if a.device.type == "cuda" and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b)
