"""Engines that sample from the policy, and the pool through which everybody reaches them."""

from typing import TYPE_CHECKING

from paceline.inference.base import (
    Completion,
    Engine,
    EngineError,
    EngineStats,
    Finish,
    GenerateRequest,
    Grammar,
    Limits,
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
from paceline.inference.pool import NobodyLeft, Pool
from paceline.lazily import lazily

if TYPE_CHECKING:
    from paceline.inference.engine import EmbeddedEngine

__all__ = [
    "Completion",
    "EmbeddedEngine",
    "Engine",
    "EngineError",
    "EngineStats",
    "Finish",
    "GenerateRequest",
    "Grammar",
    "HttpEngine",
    "Limits",
    "Listener",
    "Mismatch",
    "NobodyLeft",
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
