"""Filters, length rules and replay: settings that decide which sampled groups train."""

from collections.abc import Sequence
from math import floor, gcd

from pydantic import Field

from paceline.config.base import Hook, Section


class ReplayConfig(Section):
    """Recent groups that train once more, while no token of theirs is older than `staleness` allows."""

    share: float = Field(default=0.0, ge=0, lt=1)
    """Most of a batch's places that replayed groups may take; 0 turns replay off."""
    groups: int = Field(default=256, ge=1)
    """Recent groups that are remembered."""
    times: int = Field(default=1, ge=1)
    """How often a group may be replayed."""

    def places(self, batch_size: int, group_sizes: Sequence[int]) -> int:
        """Places of a batch that replay may fill: whole groups, and never so many that no fresh one fits in.

        >>> [ReplayConfig(share=share).places(16, [4]) for share in (0.3, 0.9, 0.2)]
        [4, 12, 0]
        """
        # The share is written in decimals: 0.29 of 100 is 29, whatever the product rounds to.
        places = min(floor(self.share * batch_size + 1e-9), batch_size - max(group_sizes))
        places -= places % gcd(*group_sizes)
        return places if places >= min(group_sizes) else 0


class FiltersConfig(Section):
    """Groups that never reach the trainer."""

    zero_advantage: bool = True
    """Drop groups in which every advantage is zero; they carry no gradient. Off where `group_size` is 1."""
    group: Hook | None = None
    """A function `fn(group, **kwargs)` that answers whether to keep a group that has its credit already; all are kept
    when left out."""


class LengthConfig(Section):
    """Handling of replies that come near `sampling.max_tokens`."""

    mask_truncated: bool = False
    """Sampled tokens of a cut-off rollout do not train. Its reward still counts in the baseline of the others."""
    buffer: int = Field(default=0, ge=0)
    """Tokens below `sampling.max_tokens` in which a reply costs some of its reward: nothing where they begin, all of
    `penalty` at the limit; 0 turns the penalty off."""
    penalty: float = Field(default=1.0, gt=0)
    """Reward that a reply at the limit loses."""
