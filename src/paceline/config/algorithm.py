"""Algorithms: who gets credit, and which loss each token trains."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from paceline.config.algorithm_selfplay import RAE, Constant, Hierarchical
from paceline.config.base import Hook, Section

__all__ = ["GRPO", "RAE", "AlgorithmConfig", "Constant", "Custom", "Hierarchical", "MaxRL", "Reward"]


class GRPO(Section):
    """Reward minus the group's mean reward."""

    group_relative: ClassVar[bool] = True

    type: Literal["grpo"] = "grpo"
    std: Literal["none", "population", "sample"] = "none"
    """Divide by the group's standard deviation. `none` avoids overweighting very easy and very hard rows."""
    positive_only: bool = False
    """Clamp negative advantages to zero."""


class MaxRL(Section):
    """(Reward - mean) / mean: the gradient of the log of the mean reward."""

    group_relative: ClassVar[bool] = True

    type: Literal["max_rl"] = "max_rl"


class Reward(Section):
    """The reward itself, broadcast over the sampled tokens."""

    group_relative: ClassVar[bool] = False

    type: Literal["reward"] = "reward"


class Custom(Hook):
    """A user's credit function `fn(inputs, **kwargs)` or `Algorithm` subclass, by import path."""

    group_relative: ClassVar[bool] = False

    type: Literal["custom"] = "custom"


AlgorithmConfig = Annotated[GRPO | MaxRL | Reward | Constant | RAE | Hierarchical | Custom, Field(discriminator="type")]
