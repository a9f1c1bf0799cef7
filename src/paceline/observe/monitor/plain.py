"""Shows a run without a terminal: as lines of text, or as a cell of a notebook; and curves as lines of blocks."""

import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Final, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from paceline.observe.monitor.base import Monitor, RunOutcome, RunPlan, phase_kind
from paceline.observe.monitor.summary import Curve, MetricHistory
from paceline.observe.monitor.text import (
    format_amount,
    format_count,
    format_reasons,
    format_score,
    format_seconds,
    one_line,
    restore_paths,
)

_HEARTBEAT = 10.0
"""Seconds of silence after which known work shows its progress again."""
NOTEBOOK_STEPS, NOTEBOOK_NOTES = 8, 4
"""Steps in a notebook's table, and notes below it."""
REFRESH_SECONDS = 0.5
"""Least time between two updates: every one of them is kept in the notebook's file until it is saved."""
Display = Callable[..., Any]
"""IPython's `display`."""


class PlainLines(Monitor):
    """One short line a step; phases and notes as lines too.

    A log is read later and by others, so work that comes back every few steps is announced once, and again
    only when nothing else has been printed for a while. Work whose count was printed also prints the end of it.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._total: int | None = None
        self._kinds: set[str] = set()
        self._counting = ""
        """The kind of work whose count was printed and is not complete."""
        self._printed = clock()

    def begin(self, plan: RunPlan) -> None:
        self._total = plan.total_steps
        length = f", {format_amount(plan.total_steps, 'step')}" if plan.total_steps else ""
        start = f", going on after step {plan.start_step}" if plan.start_step else ""
        self._print(
            f"paceline {plan.name}: {', '.join(plan.envs)}; {format_count(plan.parameters)} parameters "
            f"on {plan.device}{length}{start}; writing to {plan.directory}"
        )

    def phase(self, text: str) -> None:
        kind = phase_kind(text)
        count = re.search(r"(\d+)/(\d+)", text)
        is_complete = count is not None and count[1] == count[2]
        is_silent = self._clock() - self._printed > _HEARTBEAT
        if kind not in self._kinds or is_silent or (is_complete and kind == self._counting):
            self._kinds.add(kind)
            self._counting = kind if count and not is_complete else ""
            self._print(f"... {one_line(text)}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._print(step_line(step, self._total, metrics))

    def note(self, text: str) -> None:
        self._print(f"note: {one_line(text)}")

    def end(self, outcome: RunOutcome) -> None:
        self._print(f"{outcome.status} at step {outcome.step}")

    def _print(self, line: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(restore_paths(line).encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._stream.flush()
        self._printed = self._clock()


def step_line(step: int, total: int | None, metrics: Mapping[str, float]) -> str:
    """`step  12/40  reward 0.612  eval 0.43  stale 0.8  4.1k tok/s  0.31 s`, as far as each is known."""
    now = MetricHistory.of([{**metrics, "step": step}])
    width = len(str(total)) if total else 4
    parts = [f"step {step:>{width + 1}}/{total}" if total else f"step {step:>{width}}"]
    parts += _scores("reward", now.rewards, 3)
    # Exact matches say more than a shaped reward; not every environment has them.
    parts += _scores("eval", {**now.held_out, **now.exact}, 2)
    if "staleness/mean" in now.latest:
        parts.append(f"stale {now.latest['staleness/mean']:.1f}")
    if "tokens/s" in now.latest:
        parts.append(f"{format_count(now.latest['tokens/s'])} tok/s")
    if "time/step" in now.latest:
        parts.append(format_seconds(now.latest["time/step"]))
    if lost := format_reasons(now.dropped):
        parts.append(f"dropped {lost}")
    return "  ".join(parts)


def _scores(label: str, curves: Mapping[str, Curve], digits: int) -> list[str]:
    """One number needs no name; several are told apart by their environments."""
    values = {env: format_score(curve[-1][1], digits) for env, curve in curves.items() if curve}
    if len(values) <= 1:
        return [f"{label} {value}" for value in values.values()]
    return [f"{label} " + ", ".join(f"{env} {value}" for env, value in values.items())]


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class NotebookView(Monitor):
    """One output of a cell that follows the run."""

    def __init__(self, display: Display | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if display is None:
            from IPython.display import display
        self._display, self._clock = display, clock
        self._handle: Any = None
        self._updated_at = float("-inf")
        self._plan: RunPlan | None = None
        self._phase = "starting"
        self._steps: dict[int, dict[str, float]] = {}
        self._notes: list[str] = []
        self._outcome: RunOutcome | None = None

    def begin(self, plan: RunPlan) -> None:
        self._plan = plan
        self._show(at_once=True)

    def phase(self, text: str) -> None:
        self._phase = text
        self._show()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._steps[step] = dict(metrics)
        self._phase = ""
        self._show()

    def note(self, text: str) -> None:
        self._notes.append(one_line(text))
        self._show(at_once=True)

    def roll_back(self, step: int) -> None:
        self._steps = {number: metrics for number, metrics in self._steps.items() if number <= step}

    def end(self, outcome: RunOutcome) -> None:
        self._outcome = outcome
        self._show(at_once=True)

    def _show(self, at_once: bool = False) -> None:
        now = self._clock()
        if not at_once and now - self._updated_at < REFRESH_SECONDS:
            return
        self._updated_at = now
        if self._handle is None:
            self._handle = self._display(self, display_id=True)
        else:
            self._handle.update(self)

    @property
    def _step(self) -> int:
        return max(self._steps, default=self._plan.start_step if self._plan else 0)

    def __repr__(self) -> str:
        """For a notebook that shows text alone."""
        total = self._plan.total_steps if self._plan else None
        latest = step_line(self._step, total, self._steps[self._step]) if self._steps else self._phase
        return latest if self._outcome is None else f"{self._outcome.status} at step {self._outcome.step}; {latest}"

    def _repr_html_(self) -> str:
        notes = [f"<div>! {escape(note)}</div>" for note in self._notes[-NOTEBOOK_NOTES:]]
        return "".join([*self._heading(), *self._table(), *notes])

    def _heading(self) -> list[str]:
        plan = self._plan
        now = f"{self._outcome.status} {self._outcome.message}" if self._outcome else self._phase
        if plan is None:
            return [f"<div>{escape(now)}</div>"]
        total = plan.total_steps
        bar = f'<progress value="{self._step}" max="{total}" style="width: 20em"></progress> ' if total else ""
        step = f"step {self._step}/{total}" if total else f"step {self._step}"
        where = f"{plan.name}, {format_count(plan.parameters)} parameters on {plan.device}, {plan.directory}"
        return [f"<div>{escape(where)}</div>", f"<div>{bar}{step} {escape(now)}</div>"]

    def _table(self) -> list[str]:
        steps = (_table_row(step, metrics) for step, metrics in sorted(self._steps.items()))
        rows = [row for row in steps if len(row) > 1][-NOTEBOOK_STEPS:]
        names = list(dict.fromkeys(name for row in rows for name in row))
        if not rows:
            return []
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = ("".join(f"<td>{escape(row.get(name, ''))}</td>" for name in names) for row in rows)
        return ["<table><tr>", head, "</tr>", *(f"<tr>{cells}</tr>" for cells in body), "</table>"]


def _table_row(step: int, metrics: Mapping[str, float]) -> dict[str, str]:
    """The cells of one step, by the name of their column."""
    now = MetricHistory.of([{**metrics, "step": step}])
    measured = {key.removeprefix("metric/"): value for key, value in now.latest.items() if key.startswith("metric/")}
    speeds = (("tok/s", "tokens/s", format_count), ("time", "time/step", format_seconds))
    return {
        "step": str(step),
        **_cells("reward", now.rewards),
        **{name: format_score(value) for name, value in measured.items()},
        **_cells("held-out", {**now.held_out, **now.exact}),
        **{name: form(now.latest[key]) for name, key, form in speeds if key in now.latest},
    }


def _cells(name: str, curves: Mapping[str, Curve]) -> dict[str, str]:
    several = len(curves) > 1
    return {f"{name} {env}" if several else name: format_score(curve[-1][1]) for env, curve in curves.items() if curve}


_LEVELS: Final = "▁▂▃▄▅▆▇█"


class Sparkline:
    """A curve in one line of blocks. One too long for its room is averaged, a short one is not stretched."""

    def __init__(self, values: Sequence[float], style: str = "cyan") -> None:
        self.values = values
        self.style = style

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(8, options.max_width), options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(block_chars(self.values, options.max_width), style=self.style, no_wrap=True, overflow="crop")


def block_chars(values: Sequence[float], width: int) -> str:
    """The values as at most `width` block characters, from the lowest of them to the highest."""
    if not values or width < 1:
        return ""
    points = min(len(values), width)
    edges = [index * len(values) // points for index in range(points + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    # A flat curve should look flat, and not like noise blown up to full height.
    span = max(high - low, 0.05 * max(1.0, abs(high)))
    return "".join(_LEVELS[min(7, int((mean - low) / span * 8))] for mean in means)
