"""A short token sequence whose log probabilities show whether two parties compute with the same weights."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.model.attention import PLAN, PackedPlan
from paceline.model.head import LMHead, token_logprobs
from paceline.weights.update import Canary, canary_ids, canary_of


def make_canary(
    model: PreTrainedModel,
    head: LMHead,
    dtype: torch.dtype | None = None,
    quiet: Callable[[], AbstractContextManager] = torch.inference_mode,
) -> Canary:
    """Arbitrary tokens, always the same for a vocabulary, as this model sees them now. `dtype` is what it computes in,
    where it keeps its weights in another; `quiet` turns gradients off."""
    ids = canary_ids(head.vocabulary)
    with quiet():
        logprobs = sequence_logprobs(model, head, ids)
    return canary_of(ids, logprobs, dtype or model.dtype)


def sequence_logprobs(model: PreTrainedModel, head: LMHead, token_ids: Sequence[int]) -> list[float]:
    """Log probability of each token given those before it, at temperature 1; 0.0 for the first."""
    return [0.0, *_Pass(model, head, token_ids)().tolist()]


class _Pass:
    """One forward pass over always the same tokens, its inputs laid out beforehand."""

    def __init__(self, model: PreTrainedModel, head: LMHead, token_ids: Sequence[int]) -> None:
        self._model, self._head = model, head
        self._ids = torch.tensor(token_ids, device=model.device)
        self._positions = torch.arange(len(token_ids), device=model.device)[None]
        self._plan = PackedPlan([len(token_ids)], model.device)
        self._ones = torch.ones(len(token_ids) - 1, device=model.device)

    def __call__(self) -> Tensor:
        ids, decoder = self._ids, self._model.get_decoder()
        out = decoder(input_ids=ids[None], position_ids=self._positions, use_cache=False, **{PLAN: self._plan})
        return token_logprobs(self._head, out.last_hidden_state[0, :-1], ids[1:], self._ones)[0]


class CanaryScorer:
    """`sequence_logprobs` of the same tokens, version after version. On CUDA the pass is captured and launched whole:
    hundreds of small launches would each wait for Python's lock, which an engine and a trainer both want."""

    def __init__(self, model: PreTrainedModel, head: LMHead) -> None:
        self._model, self._head = model, head
        self._known: tuple[object, ...] = ()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pass: _Pass | None = None
        """Its inputs are read at every launch."""
        self._sung = torch.empty(0)

    def logprobs(self, token_ids: tuple[int, ...]) -> list[float]:
        with torch.inference_mode():
            if self._model.device.type != "cuda":
                return sequence_logprobs(self._model, self._head, token_ids)
            # A plan of another kind than the compiled one: compiling for a single short pass would hold up other work.
            with torch.compiler.set_stance("force_eager"):
                return self._launched(token_ids)

    def _launched(self, token_ids: tuple[int, ...]) -> list[float]:
        held = (*self._model.parameters(), *self._model.buffers())
        known = (token_ids, *(tensor.data_ptr() for tensor in held))
        if known != self._known:  # the first time, and where weights that slept woke elsewhere
            self._capture(token_ids)
            self._known = known
        if self._graph is None:
            return sequence_logprobs(self._model, self._head, token_ids)
        self._graph.replay()
        return [0.0, *self._sung.tolist()]

    def _capture(self, token_ids: tuple[int, ...]) -> None:
        aside, graph = torch.cuda.Stream(self._model.device), torch.cuda.CUDAGraph()
        self._pass = run = _Pass(self._model, self._head, token_ids)
        run()  # whatever a kernel does the first time it does here
        aside.wait_stream(torch.cuda.current_stream(self._model.device))
        self._graph = None
        try:
            with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                self._sung = run()
        except RuntimeError:  # a model that looks at its positions from the host: step by step, then
            return
        self._graph = graph
