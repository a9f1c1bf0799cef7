"""Finds the shape of a model's attention: all that a KV cache must know about it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.model.attention import PLAN, UnsupportedModel


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The same heads in every layer; windows may differ."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Per layer, how many tokens a query sees, itself included; None for all."""


def attention_shape(model: PreTrainedModel) -> AttentionShape:
    """Found by asking: one token goes through the model and every layer says what it would attend to.

    Configs spell heads, windows and layer types in a dozen ways; what reaches the attention function is the truth.
    """
    probe = _Probe(type(model).__name__)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        model.get_decoder()(input_ids=token, position_ids=token, use_cache=False, **{PLAN: probe})
    return probe.shape(model.config.get_text_config().num_hidden_layers)


class _Probe:
    """A plan that attends to nothing and writes down what it was asked."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._asked: dict[int, tuple[int, int, int]] = {}
        self._windows: dict[int, int | None] = {}

    def attend(self, layer: int | Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        layer = int(layer)
        if layer in self._asked:
            raise UnsupportedModel(f"{self._kind}: layer {layer} attends more than once; not supported")
        if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
            sizes = f"{q.shape[-1]}, {k.shape[-1]} and {v.shape[-1]}"
            raise UnsupportedModel(
                f"{self._kind}: queries, keys and values of different sizes ({sizes}); not supported"
            )
        self._asked[layer] = (q.shape[1], k.shape[1], q.shape[2])
        self._windows[layer] = window or None
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    def shape(self, layers: int) -> AttentionShape:
        if sorted(self._asked) != list(range(layers)):
            silent = sorted(set(range(layers)) - self._asked.keys())
            raise UnsupportedModel(
                f"{self._kind}: layers {silent} of {layers} do not attend through transformers' attention interface "
                "(state-space, linear or convolutional layers, or attention of their own); not supported"
            )
        shapes = set(self._asked.values())
        if len(shapes) > 1:
            raise UnsupportedModel(f"{self._kind}: layers with different numbers of heads {shapes}; not supported")
        heads, kv_heads, head_dim = shapes.pop()
        windows = tuple(self._windows[layer] for layer in range(layers))
        return AttentionShape(layers, heads, kv_heads, head_dim, windows)
