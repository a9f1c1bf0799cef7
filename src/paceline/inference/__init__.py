"""Engines that sample from the policy, and the pool through which everybody reaches them."""

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
    Overloaded,
    Piece,
    RequestError,
    TopLogprobs,
    UnknownModel,
    Unreachable,
)
from paceline.inference.engine import EmbeddedEngine, noise_key
from paceline.inference.http import HttpEngine
from paceline.inference.pool import Pool

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
    "Overloaded",
    "Piece",
    "Pool",
    "RequestError",
    "TopLogprobs",
    "UnknownModel",
    "Unreachable",
    "noise_key",
]
