"""Advisory settings: the limit of each, and which of them pause an environment."""

from typing import Literal

from pydantic import Field

from paceline.config.base import Section

AdvisoryName = Literal[
    "flat_groups", "length", "truncation", "format", "parting", "judges", "entropy", "mismatch", "starving", "idle"
]


class AdviceConfig(Section):
    """Advisories: `paceline doctor` and the page "Advice" show them, each with its evidence. A key named like an
    advisory is the limit from which it speaks, once the figures are sure to lie beyond it by three standard errors."""

    steps: int = Field(default=20, ge=10, le=1000)
    """The last steps that are looked at."""
    pause: list[AdvisoryName] = Field(default_factory=list)
    """Advisories at which nothing more is drawn from the environment they speak of, until the steps that gave rise to
    them lie behind. One about the whole run, and one about the only environment left, stops the run with a checkpoint.
    `pause` of an [[env]] goes before."""
    interval: int = Field(default=5, ge=1)
    """Steps between two looks of a run that may pause an environment."""

    flat_groups: float = Field(default=0.7, gt=0, lt=1)
    """Share of groups without variance in reward. Groups that all earn the best reward seen so far are not counted."""
    length: float = Field(default=0.5, gt=0)
    """Change in length of replies, as a share of what it was, while the reward does not rise."""
    truncation: float = Field(default=0.1, gt=0, lt=1)
    """Share of replies cut off at `sampling.max_tokens`."""
    format: float = Field(default=0.8, gt=0, lt=1)
    """Share of the differences in reward within a group that metrics of form alone explain."""
    parting: float = Field(default=0.25, gt=0)
    """How far training reward leaves held-out reward behind, in standard deviations of the reward."""
    judges: float = Field(default=0.4, gt=0, lt=1)
    """Krippendorff's alpha below which judges count as disagreeing; 1 is agreement, 0 is chance."""
    entropy: float = Field(default=0.1, gt=0, lt=1)
    """Entropy left, as a share of the first steps', while rewards are still to be had."""
    mismatch: float = Field(default=0.015, gt=0)
    """`mismatch_kl`, in nats a token."""
    starving: float = Field(default=0.2, gt=0, lt=1)
    """Share that an environment has in the gradient, relative to what its weight asks for."""
    idle: float = Field(default=0.75, gt=0, lt=1)
    """Share of the time in which trainer or sampler has nothing to do, where they need not take turns."""
