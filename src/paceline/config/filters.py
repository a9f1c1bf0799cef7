"""What of the sampled groups reaches the trainer."""

from pydantic import Field

from paceline.config.base import Hook, Section


class Filters(Section):
    """Groups that never reach the trainer."""

    zero_advantage: bool = True
    """Drop groups in which every advantage is zero; they carry no gradient. Off where `group_size` is 1."""
    group: Hook | None = None
    """A function `fn(group, **kwargs)` that answers whether to keep a group that has its credit already; all are kept
    when left out."""


class Length(Section):
    """What becomes of replies that come near `sampling.max_tokens`."""

    mask_truncated: bool = False
    """What a cut-off rollout said does not train. Its reward still counts in the baseline of the others."""
    buffer: int = Field(default=0, ge=0)
    """Tokens below `sampling.max_tokens` in which a reply costs some of its reward: nothing where they begin, all of
    `penalty` at the limit; 0 costs nobody anything."""
    penalty: float = Field(default=1.0, gt=0)
    """What a reply at the limit loses."""
