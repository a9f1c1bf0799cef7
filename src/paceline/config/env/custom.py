"""Environments of a user's own: a class, a reward function over a dataset, a self-play arena."""

from typing import Literal

from pydantic import Field

from paceline.config.base import Hook, Section
from paceline.config.env.base import BaseEnvConfig, DatasetEnvConfig, Source


class LeagueConfig(Section):
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


class ArenaEnvConfig(BaseEnvConfig, Hook):
    """Self-play: a `paceline.arena.Arena` class, or a function that makes one, by import path."""

    type: Literal["arena"] = "arena"
    train_examples: int = Field(default=1024, ge=1)
    """Draws that make an epoch, where the arena draws its episodes itself (`get_batch`)."""
    league: LeagueConfig | None = None
    """Opponents from the past, and ratings."""


class RewardEnvConfig(DatasetEnvConfig, Hook):
    """One prompt, one completion, scored by your own function `score(completion, answer)`: parameters are filled by
    name with the row's columns. Rows have `messages`, `prompt` or `question`, and whatever the function asks for."""

    type: Literal["reward"] = "reward"
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Where `import_path` names a list or dict of functions: what each is multiplied by in the sum, by name; 1 when
    left out."""
    system: str = ""
    """System message put before rows that have none; empty for none."""


class CustomEnvConfig(BaseEnvConfig, Hook):
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
    """Renames fields of the rows, `{gt_answer = "answer"}`; `a.b` reaches into an object."""
