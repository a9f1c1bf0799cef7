"""Self-play arenas."""

from typing import Literal

from pydantic import Field

from paceline.config.base import Hook, Section
from paceline.config.env.base import EnvBase


class League(Section):
    """Past versions of the policy as opponents. Under LoRA each is one more adapter of the same engine; otherwise each
    has an engine of its own, and its memory."""

    every: int = Field(default=20, ge=1)
    """Steps between two versions that are kept; the untrained policy always is."""
    size: int = Field(default=4, ge=2)
    """Past versions at most. A full league keeps those that are spread best over the run."""
    rule: Literal["latest", "uniform", "hardest"] = "hardest"
    """Which of them is met: the newest, any, or rather those the policy loses to."""
    mirror: float = Field(default=0.5, ge=0, le=1)
    """Share of groups in which the policy meets itself as it is."""
    games: int = Field(default=32, ge=2)
    """Games for the ratings against each past version, at every evaluation."""


class ArenaEnv(EnvBase, Hook):
    """Self-play: a `paceline.arena.Arena` class, or a function that makes one, by import path."""

    type: Literal["arena"] = "arena"
    train_examples: int = Field(default=1024, ge=1)
    """Draws that make an epoch, where the arena draws its episodes itself (`get_batch`)."""
    league: League | None = None
    """Opponents from the past, and ratings."""
