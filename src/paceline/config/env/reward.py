"""A dataset and reward functions: the task that needs no environment class."""

from typing import Literal

from pydantic import Field

from paceline.config.base import Hook
from paceline.config.env.dataset import DatasetEnv


class RewardEnv(DatasetEnv, Hook):
    """One prompt, one completion, scored by your own function `score(completion, answer)`: parameters are filled by
    name with the row's columns. Rows have `messages`, `prompt` or `question`, and whatever the function asks for."""

    type: Literal["reward"] = "reward"
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Where `import_path` names a list or dict of functions: what each is multiplied by in the sum, by name; 1 when
    left out."""
    system: str = ""
    """System message put before rows that have none; empty for none."""
