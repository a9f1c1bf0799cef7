"""All advisories, and how to ask for them."""

from collections.abc import Callable
from dataclasses import dataclass

from paceline.config.advice import AdvisoryName
from paceline.record.advice import (
    entropy,
    flat_groups,
    format,
    idle,
    judges,
    length,
    mismatch,
    parting,
    starving,
    truncation,
)
from paceline.record.advice.advisory import Advisory
from paceline.record.advice.sight import Sight


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that is looked for."""

    name: AdvisoryName
    asks: str
    """What is looked for, for somebody who sees nothing found."""
    look: Callable[[Sight, str], Advisory | None]
    by_env: bool = True
    """Whether it speaks of one environment, or of the whole run."""


RULES = (
    Rule("flat_groups", "Do the members of a group get different rewards?", flat_groups.look),
    Rule("length", "Do replies grow or shrink while the reward does not rise?", length.look),
    Rule("truncation", "Are replies cut off at the limit?", truncation.look),
    Rule("format", "Does reward follow form alone?", format.look),
    Rule("parting", "Does training reward leave held-out reward behind?", parting.look),
    Rule("judges", "Do judges agree with one another?", judges.look),
    Rule("entropy", "Is entropy used up before the task is learnt?", entropy.look, by_env=False),
    Rule("mismatch", "Do engine and trainer compute the same?", mismatch.look, by_env=False),
    Rule("starving", "Does every environment have its share in the gradient?", starving.look),
    Rule("idle", "Are trainer and sampler busy?", idle.look, by_env=False),
)


def advise(sight: Sight, names: frozenset[str] | None = None) -> list[Advisory]:
    """What these rules have to say, or all of them."""
    found = [
        rule.look(sight, env)
        for rule in RULES
        if names is None or rule.name in names
        for env in (sight.envs if rule.by_env else [""])
    ]
    return [advisory for advisory in found if advisory is not None]
