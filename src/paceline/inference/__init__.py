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
    Mismatch,
    Overloaded,
    Piece,
    RequestError,
    TopLogprobs,
    UnknownModel,
    Unreachable,
)
from paceline.inference.engine import EmbeddedEngine, noise_key
from paceline.inference.http import HttpEngine
from paceline.inference.pool import NobodyLeft, Pool

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
