"""Computes logits and log probabilities from hidden states, alike in engine and trainer.

The canary is a short token sequence whose log probabilities show whether two parties compute with the same weights.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from paceline.model.attention import PackedPlan, hidden_states
from paceline.weights.update import Canary, canary_ids, canary_of

ELEMENTS = {"cuda": 1 << 29, "cpu": 1 << 25}
"""Most logits held at once: 1 GiB in bfloat16 on a GPU, 128 MiB in float32 elsewhere."""


def logprobs_and_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """Log probability and entropy of each row, both differentiable."""
    logprobs, entropies = _LogprobsAndEntropy.apply(hidden, weight, targets, temperatures)
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
    logits: Tensor, targets: Tensor, temperatures: Tensor, normalisers: Tensor, entropies: Tensor, by_logprob: Tensor,
    by_entropy: Tensor,
) -> Tensor:  # fmt: skip
    """Logits turned in place into the gradient with respect to them."""
    if logits.device.type == "cuda":
        from paceline.model import cuda_head

        return cuda_head.differentiate_(logits, targets, temperatures, normalisers, entropies, by_logprob, by_entropy)
    logp = logits.to(temperatures.dtype) / temperatures[:, None] - normalisers[:, None]
    p = logp.exp()
    grad = -p * (by_logprob[:, None] + by_entropy[:, None] * (logp + entropies[:, None]))
    grad.scatter_add_(-1, targets[:, None], by_logprob[:, None])
    return logits.copy_(grad / temperatures[:, None])


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor):  # noqa: ANN001, ANN205
        rows = max(1, ELEMENTS[hidden.device.type] // weight.shape[0])
        chunks = zip(hidden.split(rows), targets.split(rows), temperatures.split(rows), strict=True)
        done = [measure(F.linear(h, weight), t, temperature) for h, t, temperature in chunks]
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
            logits = differentiate_(F.linear(here, weight), *given)
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
        self._is_plain = not fp32 and not self._softcap and self._multiply == self._divide

    def __call__(self, hidden: Tensor) -> Tensor:
        """Float32 logits for [..., hidden]."""
        if self._fp32 and self._layer.weight.dtype != torch.float32:
            bias = None if self._layer.bias is None else self._layer.bias.float()
            logits = F.linear(hidden.float(), self._layer.weight.float(), bias)
        else:
            logits = self._layer(hidden).float()
        logits = logits if self._multiply == self._divide else logits * (self._multiply / self._divide)
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def native_logits(self, hidden: Tensor) -> Tensor:
        """The same logits, in the layer's own type where nothing is applied to them: half the bytes to read."""
        return self._layer(hidden) if self._is_plain else self(hidden)

    @property
    def matrix(self) -> Tensor | None:
        """The one matrix that makes the logits; None where anything else happens to them."""
        alone = self._is_plain and type(self._layer) is torch.nn.Linear and self._layer.bias is None
        return self._layer.weight if alone else None

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
        logprobs, entropies = logprobs_and_entropy(hidden, matrix, targets, temperatures)
        return logprobs, entropies if entropy else None
    rows = max(1, LOGIT_ELEMENTS // head.vocabulary)
    if len(targets) <= rows:
        return _chunk(head, hidden, targets, temperatures, entropy, entropy_grad)
    score = partial(checkpoint, _chunk, use_reentrant=False) if torch.is_grad_enabled() else _chunk
    chunks = zip(hidden.split(rows), targets.split(rows), temperatures.split(rows), strict=True)
    logprobs, entropies = zip(*(score(head, *chunk, entropy, entropy_grad) for chunk in chunks), strict=True)
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


@torch.no_grad()  # FSDP would keep a layer's memory for good as what inference mode made it, which no gradient may pass
def make_canary(model: PreTrainedModel, head: LMHead, dtype: torch.dtype | None = None) -> Canary:
    """Arbitrary tokens, always the same for a vocabulary, as this model sees them now. `dtype` is what it computes in,
    where it keeps its weights in another."""
    ids = canary_ids(head.vocabulary)
    return canary_of(ids, sequence_logprobs(model, head, ids), dtype or model.dtype)


def sequence_logprobs(model: PreTrainedModel, head: LMHead, token_ids: Sequence[int]) -> list[float]:
    """Log probability of each token given those before it, at temperature 1; 0.0 for the first."""
    return [0.0, *_canary_pass(model, head, token_ids)().tolist()]


def _canary_pass(model: PreTrainedModel, head: LMHead, token_ids: Sequence[int]) -> Callable[[], Tensor]:
    """One forward pass over always the same tokens, its inputs laid out beforehand."""
    ids = torch.tensor(token_ids, device=model.device)
    positions = torch.arange(len(token_ids), device=model.device)
    plan = PackedPlan([len(token_ids)], model.device)
    ones = torch.ones(len(token_ids) - 1, device=model.device)

    def run() -> Tensor:
        hidden = hidden_states(model.get_decoder(), ids, positions, plan)
        return token_logprobs(head, hidden[:-1], ids[1:], ones)[0]

    return run


class CanaryScorer:
    """`sequence_logprobs` of the same tokens, version after version. On CUDA the pass is captured and launched whole:
    hundreds of small launches would each wait for Python's lock, which an engine and a trainer both want."""

    def __init__(self, model: PreTrainedModel, head: LMHead) -> None:
        self._model, self._head = model, head
        self._known: tuple[object, ...] = ()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pass: Callable[[], Tensor] | None = None
        """Its inputs are read at every launch."""
        self._logprobs = torch.empty(0)

    def logprobs(self, token_ids: tuple[int, ...]) -> list[float]:
        with torch.inference_mode():
            if self._model.device.type != "cuda":
                return sequence_logprobs(self._model, self._head, token_ids)
            # A plan of another kind than the compiled one: compiling for a single short pass would hold up other work.
            with torch.compiler.set_stance("force_eager"):
                return self._launch(token_ids)

    def _launch(self, token_ids: tuple[int, ...]) -> list[float]:
        held = (*self._model.parameters(), *self._model.buffers())
        known = (token_ids, *(tensor.data_ptr() for tensor in held))
        if known != self._known:  # the first time, and where weights that slept woke elsewhere
            self._capture(token_ids)
            self._known = known
        if self._graph is None:
            return sequence_logprobs(self._model, self._head, token_ids)
        self._graph.replay()
        return [0.0, *self._logprobs.tolist()]

    def _capture(self, token_ids: tuple[int, ...]) -> None:
        aside, graph = torch.cuda.Stream(self._model.device), torch.cuda.CUDAGraph()
        self._pass = run = _canary_pass(self._model, self._head, token_ids)
        run()  # whatever a kernel does the first time it does here
        aside.wait_stream(torch.cuda.current_stream(self._model.device))
        self._graph = None
        try:
            with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                self._logprobs = run()
        except RuntimeError:  # a model that looks at its positions from the host: step by step, then
            return
        self._graph = graph
