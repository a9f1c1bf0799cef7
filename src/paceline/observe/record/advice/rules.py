"""Lists the advisory rules, runs them on a directory or a running run, and renders what they find for a terminal."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from paceline.config.filters import AdvisoryName
from paceline.data.rollout import Rollout
from paceline.observe.record.advice import learning_rules, output_rules
from paceline.observe.record.advice.measures import Advisory
from paceline.observe.record.advice.window import AdviceWindow, advice_limits, advice_window
from paceline.observe.record.folder import RunFolder
from paceline.observe.record.layout import ROW, Names, index_row, rollout_facts

MOST_LINES = 600
"""Steps of metrics that a running run remembers: enough for the last evaluations of any run."""


@dataclass(frozen=True, slots=True)
class Rule:
    name: AdvisoryName
    question: str
    """The question it checks, shown also where nothing is found."""
    check: Callable[[AdviceWindow, str], Advisory | None]
    by_env: bool = True
    """Whether it speaks of one environment, or of the whole run."""


RULES = (
    Rule("flat_groups", "Do the members of a group get different rewards?", learning_rules.check_flat_groups),
    Rule("length", "Do replies grow or shrink while the reward does not rise?", output_rules.check_length),
    Rule("truncation", "Are replies cut off at the limit?", output_rules.check_truncation),
    Rule("format", "Does reward follow form alone?", output_rules.check_format),
    Rule("parting", "Does training reward leave held-out reward behind?", learning_rules.check_parting),
    Rule("judges", "Do judges agree with one another?", learning_rules.check_judges),
    Rule("entropy", "Is entropy used up before the task is learnt?", output_rules.check_entropy, by_env=False),
    Rule("mismatch", "Do engine and trainer compute the same?", learning_rules.check_mismatch, by_env=False),
    Rule("starving", "Does every environment have its share in the gradient?", learning_rules.check_starving),
    Rule("idle", "Are trainer and sampler busy?", learning_rules.check_idle, by_env=False),
)


def advise(window: AdviceWindow, names: frozenset[str] | None = None) -> list[Advisory]:
    """The advisories of these rules, or of all."""
    return [
        replace(found, rule=rule.name, env=env, steps=found.steps if any(found.steps) else window.steps)
        for rule in RULES
        if names is None or rule.name in names
        for env in (window.envs if rule.by_env else [""])
        if (found := rule.check(window, env)) is not None
    ]


def advice(run: RunFolder) -> RenderableType:
    """The advisories of a run."""
    window = advice_window(run)
    found = advise(window)
    table = Table.grid(Column(no_wrap=True, style="dim"), Column(), padding=(0, 2))
    for advisory in found:
        first, last = advisory.steps
        table.add_row(Text(advisory.rule, "yellow"), Text(advisory.title, "bold"))
        table.add_row("seen", Text(f"{advisory.seen} (steps {first} to {last})"))
        table.add_row("how sure", Text(advisory.sure))
        if advisory.caution:
            table.add_row("but", Text(advisory.caution))
        for knob in advisory.knobs:
            now = "" if knob.now is None else f" (now {knob.now})"
            table.add_row("turn", Text(f"{knob.flag}   {knob.why}{now}"))
        if advisory.rollouts:
            table.add_row("look at", Text("rollouts " + ", ".join(map(str, advisory.rollouts))))
    return Group(Text(), Text("advice", "bold"), table if found else Text(silence_reason(window)))


def silence_reason(window: AdviceWindow) -> str:
    """Why nothing is said."""
    if not window.trained:
        return "no step has trained yet"
    if not window.config:
        return "config.toml is another version's: only what concerns the whole run was looked at, and nothing was found"
    if not window.whole:
        return "the run keeps no record (record.all): only its metrics were looked at, and nothing was found"
    return f"nothing to say about the last {window.trained} steps"


class AdviceMemory:
    """The last steps of a running run, so that advisories need no file: rows and metrics, without tokens and words. One
    thread at a time fills or reads it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._steps = advice_limits(config).steps
        self._names: Names = {}
        self._rows = np.empty(0, ROW)
        self._metrics: list[Mapping[str, Any]] = []
        """Of each row's rollout."""
        self._lines: deque[dict[str, float]] = deque(maxlen=MOST_LINES)

    def take(self, step: int, metrics: Mapping[str, float], played: Sequence[tuple[str, Sequence[Rollout]]]) -> None:
        """A step is finished, and these rollouts with their states led to it."""
        self._lines.append({"step": step, **metrics})
        ended = [(state, rollout) for state, rollouts in played for rollout in rollouts]
        rows = [index_row(step, self._names, rollout_facts(rollout, state)) for state, rollout in ended]
        self._rows = np.concatenate([self._rows, np.array(rows, ROW)])
        self._metrics += [rollout.metrics for _, rollout in ended]
        self._keep(self._rows["step"] > step - self._steps)

    def forget(self, env: str) -> None:
        """Forget what was seen of an environment."""
        self._keep(self._rows["env"] != self._names.get(("env", env), -1))
        for line in self._lines:
            for name in [name for name in line if f"/{env}/" in name]:
                del line[name]

    def advise(self, rules: frozenset[str]) -> list[Advisory]:
        """The advisories of these rules that fire now."""
        return advise(self.window(), rules)

    def window(self) -> AdviceWindow:
        names = dict.fromkeys(name for line in self._lines for name in line)
        columns = {name: [line.get(name) for line in self._lines] for name in names}
        return AdviceWindow(self._config, columns, self._rows, dict(self._names), measured=self._metrics.__getitem__)

    def _keep(self, kept: NDArray[Any]) -> None:
        self._rows, self._metrics = self._rows[kept], list(compress(self._metrics, kept))
