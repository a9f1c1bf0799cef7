"""A run's vital signs in a terminal: `paceline top RUN`. Imports neither torch nor transformers."""

from paceline.observe.terminal.watching import snapshot, watch

__all__ = ["snapshot", "watch"]
