"""The OpenAI API over an engine."""

from paceline.server.app import build_app, listen, quick_loop, serve

__all__ = ["build_app", "listen", "quick_loop", "serve"]
