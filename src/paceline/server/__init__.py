"""The OpenAI API over an engine."""

from paceline.server.app import build_app, event_loop_factory, serve
from paceline.util.connections import listen

__all__ = ["build_app", "event_loop_factory", "listen", "serve"]
