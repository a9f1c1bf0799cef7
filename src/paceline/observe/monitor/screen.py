"""The live view of a run, and the choice between it and plain lines."""

import atexit
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Final, TextIO

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from paceline.observe.monitor.base import Monitor, RunOutcome, RunPlan
from paceline.observe.monitor.directory import RunDirectory, read_valid_jsonl
from paceline.observe.monitor.plain import PlainLines, Sparkline
from paceline.observe.monitor.summary import TREND_STEPS, MetricHistory, MetricTrend
from paceline.observe.monitor.text import (
    format_amount,
    format_change,
    format_clock,
    format_count,
    format_reasons,
    format_score,
    format_seconds,
    one_line,
    restore_paths,
)

_MAX_WIDTH: Final = 120
_ROWS_AROUND: Final = 16
"""Lines of the view that are not environments."""
_OUTCOMES: Final = {"finished": ("✔", "green"), "interrupted": ("■", "yellow"), "failed": ("✘", "red")}


class Screen(Monitor):
    """Draws the run on a terminal, four times a second, and leaves the last picture there.

    The terminal is given back by `end` and `close`, and when the interpreter exits without either.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._now = console, clock
        self._plan: RunPlan | None = None
        self._history = MetricHistory()
        self._outcome: RunOutcome | None = None
        self._notes: list[str] = []
        self._started = clock()
        self._ended: float | None = None
        self._finished_steps: deque[float] = deque(maxlen=21)
        # One spinner for all frames: a new one would start its turn again.
        self._spinner = Spinner("dots", Text("starting"), style="cyan")
        # The run's threads write what the refresh thread draws.
        self._lock = threading.RLock()
        self._live = Live(console=console, get_renderable=self.frame, refresh_per_second=4)
        self._closed = False

    def begin(self, plan: RunPlan) -> None:
        history, problems = _metrics_until(plan, plan.start_step)
        with self._change():
            self._plan, self._history = plan, history
            self._started = self._now()
            self._finished_steps.append(self._started)
        for problem in problems:
            self.note(problem)

    def phase(self, text: str) -> None:
        with self._change():
            self._spinner.update(text=Text(one_line(text), no_wrap=True, overflow="ellipsis"))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._change():
            self._history.add(step, metrics)
            self._spinner.update(text=Text("training"))  # whatever was counted before the step is over
            if step == 0:  # the evaluation before training says nothing about how long a step takes
                self._finished_steps.clear()
            self._finished_steps.append(self._now())

    def note(self, text: str) -> None:
        text = restore_paths(text)
        if self._closed:
            self._console.print(Text(f"! {text}", "yellow"))
            return
        with self._change():
            self._notes.append(text)

    def roll_back(self, step: int) -> None:
        """The curves as they were then. Time spent is spent, but what a step takes is measured anew."""
        if self._plan is not None:
            history, _ = _metrics_until(self._plan, step)
            with self._change():
                self._history = history
                self._finished_steps.clear()
                self._finished_steps.append(self._now())

    def end(self, outcome: RunOutcome) -> None:
        with self._change():
            self._outcome, self._ended = outcome, self._now()
        self.close()

    def close(self) -> None:
        self._closed = True
        # Not under our lock: stopping waits for the refresh thread, which may wait for it.
        self._live.stop()
        atexit.unregister(self.close)

    @contextmanager
    def _change(self) -> Generator[None]:
        """Change what is drawn; the first change starts the drawing."""
        with self._lock:
            yield
        if not self._closed and not self._live.is_started:
            atexit.register(self.close)
            self._live.start(refresh=True)

    def frame(self) -> RenderableType:
        with self._lock:
            return self._draw(min(self._console.width, _MAX_WIDTH), self._console.height)

    def _draw(self, width: int, height: int) -> RenderableType:
        if self._plan is None:
            return self._status()
        blank = Text()
        parts: list[RenderableType] = [self._progress(self._plan), blank]
        if self._history.envs:
            parts += [self._environments(max(2, height - _ROWS_AROUND)), blank]
        if self._history.has_trained:
            lost = format_reasons(self._history.dropped, " · ")
            line = Text.assemble(("dropped   ", "dim"), lost, no_wrap=True, overflow="ellipsis")
            parts += [self._figures(width), *([line] if lost else []), blank]
        if self._notes:
            text = one_line(self._notes[-1])
            text = text if len(text) <= 240 else text[:239] + "…"
            earlier = f"  ({format_amount(len(self._notes) - 1, 'earlier note')})" if len(self._notes) > 1 else ""
            note = Table.grid(padding=(0, 1))
            note.add_row(Text("!", "bold yellow"), Text.assemble((text, "yellow"), (earlier, "dim")))
            parts.append(note)
        parts.append(self._status())
        facts = f"{self._plan.device} · {format_count(self._plan.parameters)} parameters · "
        place, room = restore_paths(self._plan.directory), width - len(facts) - 8
        return Panel(
            Group(*parts),
            title=Text.assemble(("paceline ", "bold"), (self._plan.name, "bold cyan")),
            title_align="left",
            # The end of a path says most.
            subtitle=Text(facts + (place if len(place) <= room else f"…{place[1 - room :]}"), "dim"),
            subtitle_align="right",
            border_style="bright_black",
            padding=(1, 2, 0, 2),
            width=width,
        )

    def _progress(self, plan: RunPlan) -> RenderableType:
        step, total = self._history.step, plan.total_steps
        elapsed = format_clock((self._now() if self._ended is None else self._ended) - self._started)
        left = self._seconds_left()
        columns = Column(ratio=1), Column(no_wrap=True), Column(no_wrap=True)
        row = Table.grid(*columns, padding=(0, 2), expand=True)
        row.add_row(
            ProgressBar(total=total, completed=step, pulse=total is None and not self._outcome, complete_style="cyan"),
            Text.assemble("step ", (str(step), "bold"), f"/{total}" if total else ""),
            Text(elapsed if left is None else f"{elapsed} · {format_clock(left)} left", "dim"),
        )
        return row

    def _seconds_left(self) -> float | None:
        """By the pace of the latest steps, evaluations and checkpoints between them included."""
        times = self._finished_steps
        if self._outcome or len(times) < 2 or self._plan is None or self._plan.total_steps is None:
            return None
        pace = (times[-1] - times[0]) / (len(times) - 1)
        return max(0.0, pace * (self._plan.total_steps - self._history.step) - (self._now() - times[-1]))

    def _environments(self, rows: int) -> RenderableType:
        """A line for each curve: what it measures, its curve, where it stands and how far it came (`MetricTrend`)."""
        history = self._history
        all_kinds = {"reward": history.rewards, "held-out exact": history.exact, "held-out reward": history.held_out}
        kinds = [(kind, curves) for kind, curves in all_kinds.items() if kind == "reward" or curves]
        while len(kinds) > 1 and len(kinds) * len(history.envs) > rows:
            kinds.pop()
        shown = history.envs[: max(1, rows // len(kinds))]
        table = Table(box=None, expand=True, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("environment", max_width=18, no_wrap=True, overflow="ellipsis")
        table.add_column("", style="dim", no_wrap=True)
        table.add_column("", ratio=1, no_wrap=True)
        table.add_column("now", justify="right", no_wrap=True)
        table.add_column("change", justify="right", no_wrap=True, min_width=6)
        for env, (kind, curves) in itertools.product(shown, kinds):
            curve = curves.get(env)
            window, label = (TREND_STEPS, f"reward, {TREND_STEPS} steps") if kind == "reward" else (1, kind)
            trend = MetricTrend.of(curve, window) if curve else None
            now = Text(format_score(trend.last), "bold") if trend else Text("-", "dim")
            moved = format_change(trend.first, trend.last) if trend and trend.has_moved else ""
            change = Text(moved, {"+": "green", "-": "red"}.get(moved[:1], "dim"))
            curve_cell = Sparkline(trend.values if trend else [])
            table.add_row(Text(env if kind == "reward" else ""), label, curve_cell, now, change)
        if hidden := len(history.envs) - len(shown):
            table.add_row(Text(f"and {hidden} more", "dim"))
        return table

    def _figures(self, width: int) -> RenderableType:
        latest = self._history.latest
        highest = f" (max {latest['staleness/max']:.0f})" if "staleness/max" in latest else ""

        def figure(key: str, form: Callable[[float], str]) -> Text:
            return Text(form(latest[key])) if key in latest else Text("-", "dim")

        pairs = [
            ("tokens/s", figure("tokens/s", format_count)),
            ("step time", figure("time/step", format_seconds)),
            ("trainer busy", _share_bar(latest.get("busy/trainer"))),
            ("sampler busy", _share_bar(latest.get("busy/sampler"))),
            ("staleness", figure("staleness/mean", lambda mean: f"{mean:.1f}{highest}")),
            ("length", figure("length", lambda value: format_amount(round(value), "token"))),
            ("entropy", figure("entropy", format_score)),
            ("grad norm", figure("grad_norm", format_score)),
        ]
        grids = []
        # Two under one another; those that matter least are last and need a wide screen.
        for index in range(0, 8 if width >= 100 else 6, 2):
            grids.append(Table.grid(Column(style="dim", no_wrap=True), Column(no_wrap=True), padding=(0, 1)))
            for label, value in pairs[index : index + 2]:
                grids[-1].add_row(label, value)
        return Columns(grids, padding=(0, 3))

    def _status(self) -> RenderableType:
        if self._outcome is None:
            return self._spinner
        sign, style = _OUTCOMES[self._outcome.status]
        return Text(f"{sign} {self._outcome.status} at step {self._outcome.step}", style)


def _share_bar(value: float | None) -> RenderableType:
    if value is None:
        return Text("-", "dim")
    cell = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=1.0, completed=min(1.0, value), width=10, complete_style="cyan", finished_style="cyan")
    cell.add_row(bar, f"{value:4.0%}")
    return cell


def _metrics_until(plan: RunPlan, step: int) -> tuple[MetricHistory, list[str]]:
    """A run that goes on from a checkpoint shows its whole curve; what lies past the checkpoint is undone. And what
    could not be read of it."""
    lines, problems = read_valid_jsonl(RunDirectory(plan.directory).metrics_file, {"step": int}) if step else ([], [])
    history = MetricHistory.of((line for line in lines if line["step"] <= step), plan.envs)
    history.step = step
    return history, problems


def choose_view(stream: TextIO | Monitor) -> Monitor:
    """The live view on a terminal that can draw it, plain lines anywhere else; a monitor is taken as it is."""
    if isinstance(stream, Monitor):
        return stream
    drawable = os.environ.get("TERM") != "dumb" and (stream.encoding or "").lower().replace("-", "") == "utf8"
    return Screen(Console(file=stream)) if stream.isatty() and drawable else PlainLines(stream)
