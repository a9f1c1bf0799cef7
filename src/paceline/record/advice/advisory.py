"""Data classes: an advisory, and a key that it suggests to change."""

import json
import shlex
from dataclasses import dataclass, field
from typing import Any

from paceline.config.advice import AdvisoryName

MOST_ROLLOUTS = 8
"""Rollouts that are shown as evidence: as many as a reader will open."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A key of the run file to turn."""

    key: str
    """As in `sampling.max_tokens` or `env[0].curriculum`."""
    value: Any
    now: Any
    """None where the run file has none."""
    why: str

    @property
    def text(self) -> str:
        """The value as the run file spells it."""
        return json.dumps(self.value)

    @property
    def flag(self) -> str:
        """The same for a command line."""
        key = self.key.replace("[", ".").replace("]", "")
        return f"--{key} {shlex.quote(self.value if isinstance(self.value, str) else self.text)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advisory:
    """Something a run's figures say against it. Sentences are for the user; `backticks` mark names and keys."""

    rule: AdvisoryName
    env: str = ""
    """The environment it speaks of; empty where it is the whole run."""
    title: str
    seen: str
    """What was seen, with numbers."""
    sure: str
    """Which statistic says so, with its error, and how much was looked at."""
    caution: str = ""
    """What the figures cannot say."""
    steps: tuple[int, int]
    """The steps looked at."""
    knobs: list[Knob] = field(default_factory=list)
    rollouts: list[int] = field(default_factory=list)
    """Numbers of rollouts in the record that show it, the most telling first."""
    metrics: list[str] = field(default_factory=list)
    """Curves that show it."""
