"""Lists the advisory rules, runs them on a directory or a running run, and renders what they find for a terminal."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from paceline.config.filters import AdvisoryName
from paceline.data.rollout import Rollout
from paceline.observe.record.advice import learning_rules, output_rules, task_rules, update_rules
from paceline.observe.record.advice.measures import Advisory, Finding
from paceline.observe.record.advice.prompts import PromptFacts, prompt_facts
from paceline.observe.record.advice.window import AdviceWindow, advice_limits, advice_window
from paceline.observe.record.folder import RunFolder
from paceline.observe.record.layout import ROW, Names, index_row, rollout_facts

MOST_LINES = 600
"""Steps of metrics that a running run remembers: enough for the last evaluations of any run."""


class Rule(NamedTuple):
    name: AdvisoryName
    question: str
    """The question it checks, shown also where nothing is found."""
    check: Callable[[AdviceWindow, str], Finding]
    by_env: bool = True
    """Whether it speaks of one environment, or of the whole run."""
    below: bool = False
    """Whether a value below the limit is the problem, and not one above."""


RULES = (
    Rule("unreachable", "Does every server that a run asks answer?", task_rules.check_unreachable, by_env=False),
    Rule("failures", "Do rollouts end without an error?", task_rules.check_failures),
    Rule("chat_template", "Do tokens say what messages do?", task_rules.check_chat_template, by_env=False),
    Rule("strict_grader", "Do right replies earn more than wrong ones?", task_rules.check_strict_grader),
    Rule("constant_reward", "Do rewards differ at all?", task_rules.check_constant_reward, below=True),
    Rule("entropy_high", "Does the reward outweigh the entropy bonus?", output_rules.check_entropy_high, by_env=False),
    Rule("learning_rate_high", "Does the policy keep the reward it had?", update_rules.check_learning_rate_high),
    Rule("stop_token", "Do replies end by themselves?", task_rules.check_stop_token, below=True),
    Rule("leaked_answer", "Do prompts keep the answer to themselves?", task_rules.check_leaked_answer),
    Rule("duplicate_rows", "Does each row of the dataset have its own prompt?", task_rules.check_duplicate_rows),
    Rule("stale_weights", "Are samples new enough?", update_rules.check_stale_weights, by_env=False),
    Rule("mismatch", "Do engine and trainer compute the same?", learning_rules.check_mismatch, by_env=False),
    Rule("format", "Does reward follow form alone?", output_rules.check_format),
    Rule("judges", "Do judges agree with one another?", learning_rules.check_judges, below=True),
    Rule("reward_hacking", "Do right answers rise with the reward?", task_rules.check_reward_hacking),
    Rule("overfitting", "Does training reward leave held-out reward behind?", learning_rules.check_overfitting),
    Rule("entropy", "Is entropy used up before the task is learnt?", output_rules.check_entropy, False, below=True),
    Rule("truncation", "Are replies cut off at the limit?", output_rules.check_truncation),
    Rule("length", "Do replies grow or shrink while the reward does not rise?", output_rules.check_length),
    Rule("flat_groups", "Do the members of a group get different rewards?", learning_rules.check_flat_groups),
    Rule("dropped_groups", "Does most of what is sampled train?", update_rules.check_dropped_groups, by_env=False),
    Rule("learning_rate_low", "Does the policy move?", update_rules.check_learning_rate_low, False, below=True),
    Rule("starving", "Has every environment its share in the gradient?", learning_rules.check_starving, below=True),
    Rule("slow_environment", "Are environments fast enough?", task_rules.check_slow_environment, by_env=False),
    Rule("idle", "Are trainer and sampler busy?", learning_rules.check_idle, by_env=False),
)
"""In the order of causes: what stands first may be the cause of what follows it."""

UNSTABLE_EFFECTS = {"entropy", "truncation", "length", "flat_groups", "dropped_groups", "starving"}
EFFECTS: dict[str, set[str]] = {
    "unreachable": {"failures", "dropped_groups", "slow_environment", "idle", "starving"},
    "entropy_high": UNSTABLE_EFFECTS | {"learning_rate_high", "constant_reward", "stop_token"},
    "failures": {"flat_groups", "dropped_groups", "starving", "slow_environment", "idle"},
    "chat_template": UNSTABLE_EFFECTS | {"constant_reward", "stop_token", "learning_rate_high"},
    "strict_grader": {
        "constant_reward",
        "flat_groups",
        "dropped_groups",
        "learning_rate_low",
        "slow_environment",
        "idle",
    },
    "constant_reward": {"entropy", "dropped_groups", "learning_rate_low", "slow_environment", "idle"},
    "learning_rate_high": UNSTABLE_EFFECTS
    | {"stop_token", "stale_weights", "mismatch", "format", "overfitting", "idle", "reward_hacking"},
    "stop_token": {"truncation", "length"},
    "stale_weights": {"mismatch"},
    "truncation": {"flat_groups", "dropped_groups"},
    "flat_groups": {"dropped_groups", "idle"},
    "dropped_groups": {"idle"},
    "slow_environment": {"idle"},
}
"""What else each cause brings about."""


def inspect(window: AdviceWindow, names: frozenset[str] | None = None) -> list[tuple[Rule, str, Finding]]:
    """What these rules, or all, measure of each environment or of the run."""
    return [
        (rule, env, rule.check(window, env))
        for rule in RULES
        if names is None or rule.name in names
        for env in (window.envs if rule.by_env else [""])
    ]


def advise(window: AdviceWindow, names: frozenset[str] | None = None) -> list[Advisory]:
    """The advisories of these rules, or of all, the first cause first."""
    return advisories(window, inspect(window, names))


def advisories(window: AdviceWindow, measured: Sequence[tuple[Rule, str, Finding]]) -> list[Advisory]:
    found: list[Advisory] = []
    for rule, env, finding in measured:
        if (one := finding.advisory) is None:
            continue
        cause = next((before.rule for before in found if rule.name in EFFECTS.get(before.rule, ())), "")
        steps, limit = one.steps if any(one.steps) else window.steps, getattr(window.advice, rule.name)
        found.append(
            replace(
                one,
                rule=rule.name,
                env=env,
                steps=steps,
                found=finding.value,
                limit=limit,
                follows=cause,
                knobs=[] if cause else one.knobs,  # its cause is mended first
            )
        )
    # An effect stands behind whatever is no effect.
    return sorted(found, key=lambda one: bool(one.follows))


def advice(run: RunFolder) -> RenderableType:
    """The advisories of a run."""
    window = advice_window(run)
    found = advise(window)
    table = Table.grid(Column(no_wrap=True, style="dim"), Column(), padding=(0, 2))
    for advisory in found:
        first, last = advisory.steps
        table.add_row(Text(advisory.rule, "yellow"), Text(advisory.title, "bold"))
        if advisory.follows:
            table.add_row("after", Text(f"may follow from {advisory.follows}"))
        table.add_row("seen", Text(f"{advisory.seen} (steps {first} to {last})"))
        table.add_row("found", Text(advisory.comparison))
        table.add_row("how sure", Text(advisory.basis))
        if advisory.fix:
            table.add_row("fix", Text(advisory.fix))
        if advisory.caution:
            table.add_row("note", Text(advisory.caution))
        for knob in advisory.knobs:
            now = "" if knob.now is None else f" (now {knob.now})"
            table.add_row("try", Text(f"{knob.flag}   {knob.why}{now}"))
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
    """The last steps of a running run, so that advisories need no file: rows and metrics, without tokens and texts. One
    thread at a time fills or reads it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._steps = advice_limits(config).steps
        self._names: Names = {}
        self._rows = np.empty(0, ROW)
        self._metrics: list[Mapping[str, Any]] = []
        """Of each row's rollout."""
        self._prompts: list[PromptFacts | None] = []
        """As well."""
        self._lines: deque[dict[str, float]] = deque(maxlen=MOST_LINES)

    def take(self, step: int, metrics: Mapping[str, float], played: Sequence[tuple[str, Sequence[Rollout]]]) -> None:
        """A step is finished, and these rollouts with their states led to it."""
        self._lines.append({"step": step, **metrics})
        ended = [(state, rollout) for state, rollouts in played for rollout in rollouts]
        rows = [index_row(step, self._names, rollout_facts(rollout, state)) for state, rollout in ended]
        self._rows = np.concatenate([self._rows, np.array(rows, ROW)])
        self._metrics += [rollout.metrics for _, rollout in ended]
        self._prompts += [prompt_facts(rollout.turns, rollout.target) for _, rollout in ended]
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
        return AdviceWindow(
            self._config,
            columns,
            self._rows,
            dict(self._names),
            measured=self._metrics.__getitem__,
            prompted=self._prompts.__getitem__,
        )

    def _keep(self, kept: NDArray[Any]) -> None:
        self._rows = self._rows[kept]
        self._metrics = list(compress(self._metrics, kept))
        self._prompts = list(compress(self._prompts, kept))
