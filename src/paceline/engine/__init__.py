"""The engine contract, and the embedded engine: scheduler, cache, runner, sampler."""

from typing import TYPE_CHECKING

from paceline.engine.base import (
    Completion,
    Engine,
    EngineLimits,
    EngineStats,
    Finish,
    GenerateRequest,
    Grammar,
    Listener,
    Piece,
    TopLogprobs,
)
from paceline.util.lazy_import import lazy_getattr
from paceline.weights.update import noise_key

if TYPE_CHECKING:
    from paceline.engine.embedded import EmbeddedEngine

__all__ = [
    "Completion",
    "EmbeddedEngine",
    "Engine",
    "EngineLimits",
    "EngineStats",
    "Finish",
    "GenerateRequest",
    "Grammar",
    "Listener",
    "Piece",
    "TopLogprobs",
    "noise_key",
]

__getattr__ = lazy_getattr(__name__, {"embedded": ("EmbeddedEngine",)})
