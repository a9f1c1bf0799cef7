"""Environments of a user's own."""

from typing import Literal

from pydantic import Field

from paceline.config.base import Hook
from paceline.config.env.base import EnvBase
from paceline.config.env.dataset import Source


class CustomEnv(EnvBase, Hook):
    """A user's own, by import path: an `Environment` class, or an async function `rollout(row, seat)` that answers with
    a reward, an `Outcome`, a `Rollout`, or None to drop the episode."""

    type: Literal["custom"] = "custom"
    dataset: Source | None = None
    """Training rows for a function, whatever they hold: a .jsonl, .json, .csv, .parquet or .arrow file,
    `split@owner/name` of the hub, or a URI such as `reasoning-gym:gcd?size=100`. A list mixes several in equal shares,
    `{"a.jsonl" = 3.0, "b.csv" = 1.0}` by weight."""
    eval_dataset: Source | None = None
    """Held-out rows for a function; no evaluation when left out."""
    fields: dict[str, str] = Field(default_factory=dict)
    """What the rows call things, `{gt_answer = "answer"}`; `a.b` reaches into an object."""
