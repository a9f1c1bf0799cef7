"""A short token sequence whose log probabilities show whether two parties compute with the same weights."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from transformers import PreTrainedModel

from paceline.model.attention import PLAN, PackedPlan
from paceline.model.bits import mix_int
from paceline.model.head import Head, token_logprobs
from paceline.model.weights import Canary

LENGTH = 24
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
HALF_TOLERANCE = 0.1
"""Half precision rounds differently in every kernel; wrong weights are off by more than this."""


def make_canary(
    model: PreTrainedModel,
    head: Head,
    dtype: torch.dtype | None = None,
    quiet: Callable[[], AbstractContextManager] = torch.inference_mode,
) -> Canary:
    """Arbitrary tokens, always the same for a vocabulary, as this model sees them now. `dtype` is what it computes in,
    where it keeps its weights in another; `quiet` turns gradients off."""
    ids = tuple(mix_int(place) % head.vocabulary for place in range(LENGTH))
    with quiet():
        logprobs = sequence_logprobs(model, head, ids)
    return Canary(ids, tuple(logprobs), TOLERANCE.get(dtype or model.dtype, HALF_TOLERANCE))


def rounding(dtype: torch.dtype) -> float:
    """How far apart two parties may be whose weights are the same and of which one computes in this type."""
    return 0.0 if dtype in TOLERANCE else HALF_TOLERANCE


def sequence_logprobs(model: PreTrainedModel, head: Head, token_ids: Sequence[int]) -> list[float]:
    """Log probability of each token given those before it, at temperature 1; 0.0 for the first."""
    ids = torch.tensor(token_ids, device=model.device)
    positions = torch.arange(len(ids), device=ids.device)[None]
    plan = PackedPlan([len(ids)], ids.device)
    out = model.get_decoder()(input_ids=ids[None], position_ids=positions, use_cache=False, **{PLAN: plan})
    ones = torch.ones(len(ids) - 1, device=ids.device)
    logprobs, _ = token_logprobs(head, out.last_hidden_state[0, :-1], ids[1:], ones)
    return [0.0, *logprobs.tolist()]
