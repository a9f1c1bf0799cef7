"""The embedded engine: scheduler, cache, runner, sampler."""

from paceline.inference.engine.engine import EmbeddedEngine
from paceline.inference.engine.noise import noise_key

__all__ = ["EmbeddedEngine", "noise_key"]
