"""Environments whose rows are generated: small tasks that need no data."""

from typing import Literal

from pydantic import Field

from paceline.config.env.base import EnvBase


class ReverseText(EnvBase):
    """Reverse a made-up word. Exact match pays 1; partial credit for letters in place."""

    type: Literal["reverse-text"] = "reverse-text"
    train_examples: int = Field(default=2048, ge=1, le=50_000)
    """Rows generated for training."""
    eval_examples: int = Field(default=128, ge=1, le=50_000)
    """Held-out rows generated for evaluation."""
    partial_credit: float = Field(default=0.5, ge=0, le=1)
    """The most a reply with every letter but not every place right can earn; 0 pays exact matches only."""


class Arithmetic(EnvBase):
    """Add two numbers below one hundred. Exact match pays 1."""

    type: Literal["arithmetic"] = "arithmetic"
    train_examples: int = Field(default=1024, ge=1, le=1900)
    """Rows generated for training; there are not many more sums below one hundred."""
    eval_examples: int = Field(default=128, ge=1, le=900)
    """Held-out rows generated for evaluation."""
