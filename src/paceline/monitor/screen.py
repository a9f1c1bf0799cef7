"""The live view of a run, and the choice between it and plain lines."""

import atexit
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from paceline.monitor.base import Monitor, RunOutcome, RunPlan
from paceline.monitor.directory import RunDirectory
from paceline.monitor.files import read_sound
from paceline.monitor.history import History
from paceline.monitor.plain import PlainLines
from paceline.monitor.view import View


class Screen(Monitor):
    """Draws the run on a terminal, four times a second, and leaves the last picture there.

    The terminal is given back by `end` and `close`, and when the interpreter exits without either.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._view = View(clock)
        # The run's threads write what the refresh thread draws.
        self._lock = threading.RLock()
        self._live = Live(console=console, get_renderable=self.frame, refresh_per_second=4)
        self._closed = False

    def frame(self) -> RenderableType:
        """The picture as it is now."""
        with self._lock:
            return self._view.draw(self._console.width, self._console.height)

    def begin(self, plan: RunPlan) -> None:
        history, problems = _until(plan, plan.start_step)
        self._show(lambda: self._view.begin(plan, history))
        for problem in problems:
            self.note(problem)

    def phase(self, text: str) -> None:
        self._show(lambda: self._view.phase(text))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._show(lambda: self._view.step(step, dict(metrics)))

    def note(self, text: str) -> None:
        if self._closed:
            self._console.print(Text(f"! {text}", "yellow"))
            return
        self._show(lambda: self._view.notes.append(text))

    def roll_back(self, step: int) -> None:
        if (plan := self._view.plan) is not None:
            history, _ = _until(plan, step)
            self._show(lambda: self._view.roll_back(history))

    def end(self, outcome: RunOutcome) -> None:
        self._show(lambda: self._view.end(outcome))
        self.close()

    def close(self) -> None:
        self._closed = True
        # Not under our lock: stopping waits for the refresh thread, which may wait for it.
        self._live.stop()
        atexit.unregister(self.close)

    def _show(self, update: Callable[[], None]) -> None:
        with self._lock:
            update()
        if not self._closed and not self._live.is_started:
            atexit.register(self.close)
            self._live.start(refresh=True)


def _until(plan: RunPlan, step: int) -> tuple[History, list[str]]:
    """A run that goes on from a checkpoint shows its whole curve; what lies past the checkpoint is undone. And what
    could not be read of it."""
    lines, problems = read_sound(RunDirectory(plan.directory).metrics_file, {"step": int}) if step else ([], [])
    history = History.of((line for line in lines if line["step"] <= step), plan.envs)
    history.step = step
    return history, problems


def choose(stream: TextIO | Monitor) -> Monitor:
    """The live view on a terminal that can draw it, plain lines anywhere else; a monitor is taken as it is."""
    if isinstance(stream, Monitor):
        return stream
    drawable = os.environ.get("TERM") != "dumb" and (stream.encoding or "").lower().replace("-", "") == "utf8"
    return Screen(Console(file=stream)) if stream.isatty() and drawable else PlainLines(stream)
