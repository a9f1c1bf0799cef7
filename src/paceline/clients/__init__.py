"""Engines behind a wire or in other processes, and the pool that routes requests to them."""

from paceline.clients.http import HttpEngine
from paceline.clients.pool import NoEngineLeft, Pool

__all__ = ["HttpEngine", "NoEngineLeft", "Pool"]
