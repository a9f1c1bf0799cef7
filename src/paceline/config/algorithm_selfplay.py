"""Algorithms for self-play: who gets credit when the policy plays every side."""

from typing import ClassVar, Literal

from pydantic import Field

from paceline.config.base import Section


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
