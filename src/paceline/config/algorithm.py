"""Algorithms: who gets credit, and which loss each token trains."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from paceline.config.base import Hook, Section


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


class RAE(Section):
    """Reward minus a running mean of what this actor earns in this kind of episode."""

    group_relative: ClassVar[bool] = False

    type: Literal["rae"] = "rae"
    decay: float = Field(default=0.95, ge=0, lt=1)
    """How much of the baseline stays at each group."""


class Hierarchical(Section):
    """Reward minus the mean of siblings: children of one episode among themselves, roots across the group."""

    # Children are compared inside one try, so a group of one still learns.
    group_relative: ClassVar[bool] = False

    type: Literal["hierarchical"] = "hierarchical"
    std: Literal["none", "population", "sample"] = "none"
    """Divide by the siblings' standard deviation."""
    positive_only: bool = False
    """Clamp negative advantages to zero."""


class Constant(Section):
    """A fixed advantage for every sampled token."""

    group_relative: ClassVar[bool] = False

    type: Literal["constant"] = "constant"
    value: float = 1.0
    """The advantage."""


class Custom(Hook):
    """A user's credit function `fn(inputs, **kwargs)` or `Algorithm` subclass, by import path."""

    group_relative: ClassVar[bool] = False

    type: Literal["custom"] = "custom"


AlgorithmConfig = Annotated[GRPO | MaxRL | Reward | Constant | RAE | Hierarchical | Custom, Field(discriminator="type")]
