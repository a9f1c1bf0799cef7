"""Environments: where examples come from and how an episode is played."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from paceline.config.algorithm import AlgorithmConfig
from paceline.config.base import Hook, Section


class EnvBase(Section):
    """What every environment has."""

    name: str = ""
    """Name in metrics and tickets; the type when left out. Must be unique in a run."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the rollouts, relative to the other environments."""
    group_size: int | None = Field(default=None, ge=1)
    """Rollouts per example; the run's `group_size` when left out."""
    min_group_size: int | None = Field(default=None, ge=1)
    """Fewer surviving rollouts drop the group. 2 for group-relative algorithms, else 1."""
    algo: AlgorithmConfig | None = None
    """This environment's algorithm; the run's `algo` when left out."""
    timeout: float = Field(default=120.0, gt=0)
    """Seconds an episode may take before it counts as failed."""

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if "/" in name or name == "all":
            raise ValueError("an environment name is used in metric keys: no '/' and not 'all'")
        return name


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


class CustomEnv(EnvBase, Hook):
    """A user's `Environment` class, or an async function `rollout(row, seat) -> reward`, by import path."""

    type: Literal["custom"] = "custom"
    dataset: str | None = None
    """Training rows for a function: a .jsonl, .json or .csv file."""
    eval_dataset: str | None = None
    """Held-out rows for a function; no evaluation when left out."""


EnvConfig = Annotated[ReverseText | Arithmetic | CustomEnv, Field(discriminator="type")]
