"""The list of advisory rules, and `advise`, which runs them."""

from collections.abc import Callable
from dataclasses import dataclass

from paceline.config.advice import AdvisoryName
from paceline.record.advice.advisory import Advisory
from paceline.record.advice.learning_rules import check_flat_groups, check_judges, check_mismatch, check_parting
from paceline.record.advice.output_rules import check_entropy, check_format, check_length, check_truncation
from paceline.record.advice.throughput_rules import check_idle, check_starving
from paceline.record.advice.window import AdviceWindow


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that is looked for."""

    name: AdvisoryName
    asks: str
    """The question it checks, shown also where nothing is found."""
    look: Callable[[AdviceWindow, str], Advisory | None]
    by_env: bool = True
    """Whether it speaks of one environment, or of the whole run."""


RULES = (
    Rule("flat_groups", "Do the members of a group get different rewards?", check_flat_groups),
    Rule("length", "Do replies grow or shrink while the reward does not rise?", check_length),
    Rule("truncation", "Are replies cut off at the limit?", check_truncation),
    Rule("format", "Does reward follow form alone?", check_format),
    Rule("parting", "Does training reward leave held-out reward behind?", check_parting),
    Rule("judges", "Do judges agree with one another?", check_judges),
    Rule("entropy", "Is entropy used up before the task is learnt?", check_entropy, by_env=False),
    Rule("mismatch", "Do engine and trainer compute the same?", check_mismatch, by_env=False),
    Rule("starving", "Does every environment have its share in the gradient?", check_starving),
    Rule("idle", "Are trainer and sampler busy?", check_idle, by_env=False),
)


def advise(sight: AdviceWindow, names: frozenset[str] | None = None) -> list[Advisory]:
    """The advisories of these rules, or of all."""
    found = [
        rule.look(sight, env)
        for rule in RULES
        if names is None or rule.name in names
        for env in (sight.envs if rule.by_env else [""])
    ]
    return [advisory for advisory in found if advisory is not None]
