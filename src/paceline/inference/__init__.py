"""Engines that sample from the policy, and the pool that routes requests to them."""

from typing import TYPE_CHECKING

from paceline.inference.base import (
    Completion,
    Engine,
    EngineError,
    EngineLimits,
    EngineStats,
    Finish,
    GenerateRequest,
    Grammar,
    Listener,
    Mismatch,
    Overloaded,
    Piece,
    RequestError,
    TopLogprobs,
    UnknownModel,
    Unreachable,
)
from paceline.inference.http import HttpEngine
from paceline.inference.noise import noise_key
from paceline.inference.pool import NoEngineLeft, Pool
from paceline.util.lazy_import import lazily

if TYPE_CHECKING:
    from paceline.inference.engine import EmbeddedEngine

__all__ = [
    "Completion",
    "EmbeddedEngine",
    "Engine",
    "EngineError",
    "EngineLimits",
    "EngineStats",
    "Finish",
    "GenerateRequest",
    "Grammar",
    "HttpEngine",
    "Listener",
    "Mismatch",
    "NoEngineLeft",
    "Overloaded",
    "Piece",
    "Pool",
    "RequestError",
    "TopLogprobs",
    "UnknownModel",
    "Unreachable",
    "noise_key",
]

__getattr__ = lazily(__name__, {"engine": ("EmbeddedEngine",)})
