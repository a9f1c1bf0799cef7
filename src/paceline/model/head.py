"""Computes logits and log probabilities from hidden states, alike in engine and trainer."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

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


LOGIT_ELEMENTS = 1 << 25
"""Most logits held at once: 128 MiB in float32."""


class LMHead:
    """The model's output layer with the scalings its own forward pass would apply.

    Calling it apart from the decoder is what lets the trainer never hold the logits of a whole batch, and the engine
    compute them only for the tokens it samples from.
    """

    def __init__(self, model: PreTrainedModel, fp32: bool = False) -> None:
        config = model.config.get_text_config()
        self._layer = model.get_output_embeddings()
        self._fp32 = fp32
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._multiply: float = getattr(config, "logit_scale", None) or 1.0
        self._divide: float = getattr(config, "logits_scaling", None) or 1.0
        if config.model_type == "hyperclovax":  # Granite divides by this number, HyperCLOVAX multiplies
            self._multiply, self._divide = self._divide, 1.0

    def __call__(self, hidden: Tensor) -> Tensor:
        """Float32 logits for [..., hidden]."""
        if self._fp32 and self._layer.weight.dtype != torch.float32:
            bias = None if self._layer.bias is None else self._layer.bias.float()
            logits = F.linear(hidden.float(), self._layer.weight.float(), bias)
        else:
            logits = self._layer(hidden).float()
        logits = logits * (self._multiply / self._divide) if self._multiply != self._divide else logits
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def native(self, hidden: Tensor) -> Tensor:
        """The same logits, in the layer's own type where nothing is applied to them: half the bytes to read."""
        plain = not self._fp32 and self._multiply == self._divide and not self._softcap
        return self._layer(hidden) if plain else self(hidden)

    @property
    def matrix(self) -> Tensor | None:
        """The one matrix that makes the logits; None where anything else happens to them."""
        if self._fp32 or self._softcap or self._multiply != self._divide or type(self._layer) is not torch.nn.Linear:
            return None
        return self._layer.weight if self._layer.bias is None else None

    @property
    def vocabulary(self) -> int:
        return self._layer.weight.shape[0]


def token_logprobs(
    head: LMHead,
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log probability of each target under softmax(logits / T), and optionally the entropy, with gradient if asked for.

    Works through the tokens in chunks whose logits are recomputed in the backward pass, so a batch's logits are never
    all in memory.
    """
    matrix = None if torch.is_inference_mode_enabled() else head.matrix
    if hidden.device.type == "cuda" and matrix is not None and len(targets):
        logprobs, entropies = scored(hidden, matrix, targets, temperatures)
        return logprobs, entropies if entropy else None
    rows = max(1, LOGIT_ELEMENTS // head.vocabulary)
    wanted = (entropy, entropy_grad)
    if len(targets) <= rows:
        return _chunk(head, hidden, targets, temperatures, *wanted)
    chunks = zip(hidden.split(rows), targets.split(rows), temperatures.split(rows), strict=True)
    if torch.is_grad_enabled():
        done = [checkpoint(_chunk, head, h, t, T, *wanted, use_reentrant=False) for h, t, T in chunks]
    else:
        done = [_chunk(head, h, t, T, *wanted) for h, t, T in chunks]
    logprobs, entropies = zip(*done, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None


def _chunk(
    head: LMHead, hidden: Tensor, targets: Tensor, temperatures: Tensor, entropy: bool, entropy_grad: bool
) -> tuple[Tensor, Tensor | None]:
    logits = head(hidden) / temperatures[:, None]
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    if not entropy:
        return logprobs, None
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        return logprobs, normaliser - (torch.softmax(logits, -1) * logits).sum(-1)
