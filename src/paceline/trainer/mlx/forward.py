"""Runs packed samples through an mlx model: padded rows, log probabilities of trained tokens only."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from paceline.data import MicroBatch
from paceline.data.packing import similar_lengths
from paceline.model.mlx.loading import MlxModel
from paceline.weights.update import mix_int

LOGIT_ELEMENTS = 1 << 25
"""Most logits held at once: 128 MiB in float32."""


class MlxForwardPass:
    """One model's forward pass over micro-batches; `recompute` drops activations until the backward pass."""

    def __init__(self, model: MlxModel, recompute: bool = False) -> None:
        self._model, self._recompute = model, recompute
        self.dropout_draws = 0
        """Passes that drew noise for dropout so far: what the next one draws depends on it and on nothing else."""

    def logprobs(
        self, micro_batch: MicroBatch, positions: NDArray, entropy: bool = False, entropy_grad: bool = False
    ) -> tuple[mx.array, mx.array | None]:
        """Log probabilities of the tokens at `positions`, and their entropy if asked for, with its gradient too."""
        score = _scorer(self._model, entropy, entropy_grad)
        pieces = list(self._pieces(micro_batch, positions))
        if len(pieces) > 1:
            net = self._model.net
            score = checkpoint_activations(getattr(net, "lm_head", None) or net.model.embed_tokens, score)
        values, *entropies = (mx.concatenate(part) for part in zip(*(score(*piece) for piece in pieces), strict=True))
        return values, entropies[0] if entropies else None

    def scores(self, micro_batch: MicroBatch) -> NDArray:
        """Log probabilities of the sampled tokens, on the host and without a gradient."""
        positions = micro_batch.loss_mask.nonzero()[0]
        if not len(positions):
            return np.zeros(0, np.float32)
        score = _scorer(self._model, False, False)
        # Each computed before the next: else they are all held at once.
        return np.concatenate([np.asarray(score(*piece)[0]) for piece in self._pieces(micro_batch, positions)])

    def sequence(self, token_ids: Sequence[int]) -> list[float]:
        """Log probability of each token given those before it, at temperature 1; 0.0 for the first."""
        ids = mx.array(token_ids)
        (logprobs,) = _scorer(self._model, False, False)(self._model.hidden(ids[None])[0, :-1], ids[1:], mx.ones(1))
        return [0.0, *logprobs.tolist()]

    def _pieces(self, micro_batch: MicroBatch, positions: NDArray) -> Iterator[tuple[mx.array, mx.array, mx.array]]:
        """Hidden states, targets and temperatures for as many positions at a time as logits may be held of."""
        hidden = self.before(micro_batch, positions)
        targets, temperatures = (mx.array(x[positions]) for x in (micro_batch.token_ids, micro_batch.temperatures))
        rows = max(1, LOGIT_ELEMENTS // self._model.vocabulary)
        for start in range(0, len(positions), rows):
            at = slice(start, start + rows)
            yield hidden[at], targets[at], temperatures[at]

    def before(self, micro_batch: MicroBatch, positions: NDArray) -> mx.array:
        """The hidden states that the tokens at `positions` are predicted from, a row each.

        Sequences of similar length are rows of one call, padded on the right, where causality hides it.
        """
        lengths = micro_batch.lengths.tolist()
        starts = np.cumsum(micro_batch.lengths) - micro_batch.lengths
        owners = np.repeat(np.arange(len(lengths)), micro_batch.lengths)[positions]
        parts, order = [], []
        for group in similar_lengths(lengths):
            width = max(lengths[i] for i in group)
            tokens = np.zeros((len(group), width), np.int32)
            for row, i in enumerate(group):
                tokens[row, : lengths[i]] = micro_batch.token_ids[starts[i] : starts[i] + lengths[i]]
            row_of = np.zeros(len(lengths), np.int64)
            row_of[group] = np.arange(len(group))
            asked = np.flatnonzero(np.isin(owners, group))
            if not len(asked):
                continue
            whose = owners[asked]
            at = row_of[whose] * width + positions[asked] - 1 - starts[whose]
            hidden = self._hidden(mx.array(tokens))
            parts.append(mx.take(hidden.reshape(-1, hidden.shape[-1]), mx.array(at), axis=0))
            order.append(asked)
        if len(parts) == 1:
            return parts[0]
        return mx.take(mx.concatenate(parts), mx.array(np.argsort(np.concatenate(order))), axis=0)

    def _hidden(self, tokens: mx.array) -> mx.array:
        """Dropout's noise depends on the pass and the layer alone: a layer that is recomputed must draw the same."""
        body = self._model.net.model
        if not body.training:
            return self._model.hidden(tokens)
        self.dropout_draws += 1
        layers = body.layers
        body.layers = [_Layer(layer, (self.dropout_draws << 16) + i, self._recompute) for i, layer in enumerate(layers)]
        try:
            return self._model.hidden(tokens)
        finally:
            body.layers = layers


class _Layer:
    """Stands in for a layer during a pass that trains."""

    def __init__(self, layer: Any, seed: int, recompute: bool) -> None:
        self._layer, self._seed, self._recompute = layer, mix_int(seed), recompute

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        def seeded(x: mx.array) -> mx.array:
            mx.random.seed(self._seed)  # a thread's own, so no other thread draws from it
            return self._layer(x, *args, **kwargs)

        return checkpoint_activations(self._layer, seeded)(x) if self._recompute else seeded(x)


def checkpoint_activations(module: Any, work: Callable[..., Any]) -> Callable[..., Any]:
    """Checkpointed work: it keeps only its arguments, the module's weights among them, which else get no gradient."""

    def inner(weights: Any, *args: mx.array) -> Any:
        module.update(weights)
        return work(*args)

    checkpointed = mx.checkpoint(inner)
    return lambda *args: checkpointed(module.trainable_parameters(), *args)


def _scorer(model: MlxModel, entropy: bool, entropy_grad: bool) -> Callable[..., tuple[mx.array, ...]]:
    def score(hidden: mx.array, targets: mx.array, temperatures: mx.array) -> tuple[mx.array, ...]:
        logits = model.logits(hidden) / temperatures[:, None]
        normaliser = mx.logsumexp(logits, axis=-1)
        index = mx.stop_gradient(targets[:, None])  # as an argument of what is recomputed it would be asked for one
        logprobs = mx.take_along_axis(logits, index, axis=-1)[:, 0] - normaliser
        if not entropy:
            return (logprobs,)
        if not entropy_grad:
            logits, normaliser = mx.stop_gradient(logits), mx.stop_gradient(normaliser)
        return logprobs, normaliser - (mx.softmax(logits, axis=-1) * logits).sum(-1)

    return score
