"""Fixed canary prompts, always the same for a vocabulary, and their tolerances."""

from collections.abc import Sequence
from typing import Any, Protocol

from paceline.weights.bits import mix_int
from paceline.weights.update import Canary

LENGTH = 24
TOLERANCE = 1e-3
HALF_TOLERANCE = 0.1
"""Half precision rounds differently in every kernel; wrong weights are off by more than this."""


class Vocabulary(Protocol):
    """A model, or its output layer."""

    @property
    def vocabulary(self) -> int: ...


def canary_ids(model: Vocabulary) -> tuple[int, ...]:
    return tuple(mix_int(place) % model.vocabulary for place in range(LENGTH))


def signed(ids: tuple[int, ...], logprobs: Sequence[float], dtype: Any) -> Canary:
    """A canary of these tokens, with the log probabilities of a model that computes in this type."""
    return Canary(ids, tuple(logprobs), HALF_TOLERANCE if is_half(dtype) else TOLERANCE)


def rounding(dtype: Any) -> float:
    """The tolerance between two parties with the same weights, of which one computes in this type."""
    return HALF_TOLERANCE if is_half(dtype) else 0.0


def is_half(dtype: Any) -> bool:
    """Of a type of torch or of mlx, which call them alike."""
    return str(dtype).rpartition(".")[2] not in ("float32", "float64")
