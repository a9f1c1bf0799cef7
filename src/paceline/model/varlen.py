"""Packed attention on CUDA: FlashAttention over concatenated sequences, without padding or masks.

The call is opaque to the compiler, so that one compiled layer serves every cut into sequences.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.model.support import attention_shape

MAX_HEAD_DIM = 256


class VarlenPlan:
    """Sequences laid end to end, each attending to itself alone, causally. Grouped heads stay grouped."""

    def __init__(self, lengths: list[int], device: torch.device | str) -> None:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self._starts = ends.pin_memory().to(device, non_blocking=True)
        self._longest = torch.tensor(max(lengths))  # a tensor on the host: a number would be compiled in

    def attend(self, layer: int | Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        return _varlen(q, k, v, self._starts, self._longest, scale, window or 0)[0]


def can_varlen(model: PreTrainedModel, device: torch.device) -> bool:
    """Whether FlashAttention computes this model's attention there; float32 takes the padded way."""
    if device.type != "cuda" or model.dtype not in (torch.bfloat16, torch.float16):
        return False
    return attention_shape(model).head_dim <= MAX_HEAD_DIM


@torch.library.custom_op("paceline::varlen", mutates_args=())
def _varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Attention, and the log of each row's normaliser, which the backward pass needs."""
    most = int(longest)
    out, normaliser, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, most, most, 0.0, True, False, scale=scale, **_window_sizes(window)
    )
    return out, normaliser


@_varlen.register_fake
def _(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("paceline::varlen_backward", mutates_args=())
def _varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, normaliser: Tensor, starts: Tensor, longest: Tensor,
    scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    most = int(longest)
    noise = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that is not there
    grads = torch.ops.aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out, normaliser, starts, starts, most, most, 0.0, True,
        noise, noise.new_empty(0), scale=scale, **_window_sizes(window),
    )  # fmt: skip
    return grads[0], grads[1], grads[2]


@_varlen_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _window_sizes(window: int) -> dict[str, int]:
    """A window of w sees w tokens, itself included."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _save_for_backward(ctx, inputs, output) -> None:  # noqa: ANN001 - torch's own contract
    q, k, v, starts, longest, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, starts, longest)


def _backward(ctx, grad: Tensor, _: Tensor):  # noqa: ANN001, ANN202 - torch's own contract
    q, k, v, out, normaliser, starts, longest = ctx.saved_tensors
    grads = _varlen_backward(grad, q, k, v, out, normaliser, starts, longest, ctx.scale, ctx.window)
    return *grads, None, None, None, None


_varlen.register_autograd(_backward, setup_context=_save_for_backward)
