"""The embedded engine on Apple silicon: the same scheduler and the same laws, computed with MLX."""
