"""The live view of a run in a Jupyter notebook: a bar and the latest steps, updated in place."""

import sys
import time
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from paceline.observe.monitor.base import Monitor, RunOutcome, RunPlan
from paceline.observe.monitor.plain import step_line
from paceline.observe.monitor.summary import Curve, MetricHistory
from paceline.observe.monitor.text import format_count, format_score, format_seconds, one_line

LATEST = 8
"""Steps in the table."""
NOTES = 4
REFRESH_SECONDS = 0.5
"""Least time between two updates: every one of them is kept in the notebook's file until it is saved."""
Display = Callable[..., Any]
"""IPython's `display`."""


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
        return "".join(
            [*self._heading(), *self._table(), *(f"<div>! {escape(note)}</div>" for note in self._notes[-NOTES:])]
        )

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
        steps = (_row(step, metrics) for step, metrics in sorted(self._steps.items()))
        rows = [row for row in steps if len(row) > 1][-LATEST:]
        names = list(dict.fromkeys(name for row in rows for name in row))
        if not rows:
            return []
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = ("".join(f"<td>{escape(row.get(name, ''))}</td>" for name in names) for row in rows)
        return ["<table><tr>", head, "</tr>", *(f"<tr>{cells}</tr>" for cells in body), "</table>"]


def _row(step: int, metrics: Mapping[str, float]) -> dict[str, str]:
    """The cells of one step, by the name of their column."""
    now = MetricHistory.of([{**metrics, "step": step}])
    cells = {"step": str(step)}
    cells |= _cells("reward", now.rewards)
    cells |= {
        key.removeprefix("metric/"): format_score(now.latest[key]) for key in now.latest if key.startswith("metric/")
    }
    cells |= _cells("held-out", {**now.held_out, **now.exact})
    if "tokens/s" in now.latest:
        cells["tok/s"] = format_count(now.latest["tokens/s"])
    if "time/step" in now.latest:
        cells["time"] = format_seconds(now.latest["time/step"])
    return cells


def _cells(name: str, curves: Mapping[str, Curve]) -> dict[str, str]:
    several = len(curves) > 1
    return {f"{name} {env}" if several else name: format_score(curve[-1][1]) for env, curve in curves.items() if curve}
