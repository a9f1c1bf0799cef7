"""The OpenAI API over an engine."""

from paceline.server.app import build_app, quick_loop, serve
from paceline.util.connections import listen

__all__ = ["build_app", "listen", "quick_loop", "serve"]
