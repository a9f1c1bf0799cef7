"""Self-play arenas."""

from typing import Literal

from pydantic import Field

from paceline.config.base import Hook
from paceline.config.env.base import EnvBase


class ArenaEnv(EnvBase, Hook):
    """Self-play: a `paceline.arena.Arena` class, or a function that makes one, by import path."""

    type: Literal["arena"] = "arena"
    train_examples: int = Field(default=1024, ge=1)
    """Draws that make an epoch, where the arena draws its episodes itself (`get_batch`)."""
