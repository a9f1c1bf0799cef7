"""Engines that sample from the policy, and the pool through which everybody reaches them."""

from paceline.inference.base import (
    Completion,
    Engine,
    EngineError,
    Finish,
    GenerateRequest,
    Overloaded,
    RequestError,
)
from paceline.inference.engine import EmbeddedEngine, noise_key
from paceline.inference.pool import Pool

__all__ = [
    "Completion",
    "EmbeddedEngine",
    "Engine",
    "EngineError",
    "Finish",
    "GenerateRequest",
    "Overloaded",
    "Pool",
    "RequestError",
    "noise_key",
]
