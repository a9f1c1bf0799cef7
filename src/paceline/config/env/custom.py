"""Environments of a user's own."""

from typing import Literal

from paceline.config.base import Hook
from paceline.config.env.base import EnvBase


class CustomEnv(EnvBase, Hook):
    """A user's `Environment` class, or an async function `rollout(row, seat) -> reward`, by import path."""

    type: Literal["custom"] = "custom"
    dataset: str | None = None
    """Training rows for a function: a .jsonl, .json or .csv file."""
    eval_dataset: str | None = None
    """Held-out rows for a function; no evaluation when left out."""
