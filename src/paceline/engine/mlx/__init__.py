"""The embedded engine on Apple silicon: the same scheduler and the same laws, computed with MLX."""

from paceline.engine.mlx.engine import MlxEngine

__all__ = ["MlxEngine"]
