"""A thread that notices when nothing moves, and reports which waits block which.

Nothing may be silent for longer than `record.watchdog_seconds`: a run that has not moved gets a note with the wait
graph, and all stacks in `stalled.txt`; one that moves but shows nothing, a sentence that it still does. Both come again
at growing intervals. All the while `waits.json` in the run directory holds the graph as it is, for `paceline doctor`,
also after a crash.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.observe.monitor.base import Monitor, Monitors, RunOutcome, RunPlan
from paceline.observe.monitor.directory import replace_file
from paceline.observe.monitor.text import format_seconds
from paceline.observe.monitor.waitgraph import (
    Node,
    blocking_chain,
    label,
    stack_of,
    stack_summary,
    task_stacks,
    thread_stacks,
    wait_graph,
)
from paceline.util.deadlines import registry

log = logging.getLogger("paceline.watchdog")
SNAPSHOT_SECONDS = 3.0
"""Between two looks at the wait graph for `waits.json`."""
_SNAPSHOT_COST_RATIO = 200
"""A snapshot that cost t seconds is not made again for 200 t: half a percent at most."""
_LONGEST_PATIENCE = 600.0
"""Longest time between two words about one stall."""
_BUSY_CORES = 0.2
"""Cores in use from which a process counts as computing."""
_TICK = 1.0
_CLOSE_SECONDS = 5.0


def waits_file(directory: Path, part: str = "") -> Path:
    return directory / (f"waits-{part}.json" if part else "waits.json")


def stalled_file(directory: Path, part: str = "") -> Path:
    return directory / (f"stalled-{part}.txt" if part else "stalled.txt")


@contextmanager
def watch_run(monitor: Monitors, directory: Path, seconds: float = 60.0, part: str = "") -> Generator["Watchdog"]:
    """Watch over what runs in here. `part` tells several processes of one run directory apart; 0 seconds: no words."""
    dog = Watchdog(monitor, directory, seconds, part)
    monitor.add(dog)
    dog._thread.start()
    try:
        yield dog
    finally:
        dog.stop()


class Watchdog(Monitor):
    """Hears all that the run tells its monitors, and counts what it hears as movement, as it counts waits that end.

    `check` is one round of the thread; the tests call it with a clock of their own.
    """

    def __init__(
        self,
        monitor: Monitor,
        directory: Path,
        patience: float = 60.0,
        part: str = "",
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._monitor = monitor
        self._directory, self._part = directory, part
        self._patience = patience
        self._clock, self._cpu = clock, cpu
        self._step: int | None = None
        self._phase = ""
        self._heard = 0
        self._started_at = time.time()
        self._moved_at = self._shown_at = self._snapshot_due = clock()
        self._seen = self._seen_at_show = self._progress()
        self._cpu_then = cpu()
        self._stall_due = self._slow_due = self._first_due
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._asked: float | None = None
        """When the event loop was asked for a sign of life that has not come yet."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def begin(self, plan: RunPlan) -> None:
        self.roll_back(plan.start_step)

    def phase(self, text: str) -> None:
        if threading.current_thread() is not self._thread:
            self._phase = text
            self._note_output()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, self._phase = step, ""
        self._note_output()

    def roll_back(self, step: int) -> None:
        self._step = step
        self._note_output()

    def tickets(self, records: Sequence[dict[str, Any]]) -> None:
        self.record_progress()

    def note(self, text: str) -> None:
        if threading.current_thread() is not self._thread:
            self._note_output()

    def end(self, outcome: RunOutcome) -> None:
        self._phase = f"{outcome.status} at step {outcome.step}"
        self.record_progress()

    def record_progress(self) -> None:
        self._heard += 1

    def _note_output(self) -> None:
        """The user has just seen something."""
        self.record_progress()
        self._shown_at, self._seen_at_show = self._clock(), self._progress()
        self._slow_due = self._first_due
        if self._loop is None:
            with contextlib.suppress(RuntimeError):
                self._loop, self._loop_thread = asyncio.get_running_loop(), threading.current_thread()

    # -- the thread -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Nothing is waited for any more: the snapshot goes."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)
        with contextlib.suppress(OSError):
            waits_file(self._directory, self._part).unlink(missing_ok=True)

    def _run(self) -> None:
        failed = False
        while not self._stop.is_set():
            try:
                self.check()
            except Exception:
                if not failed:
                    failed = True
                    log.exception("the watchdog stumbled, and watches on; this is told once")
            self._stop.wait(min(_TICK, max(0.05, self._patience / 10)) if self._patience else _TICK)

    def check(self) -> None:
        """Has anything moved? Say so if not, and keep the snapshot fresh. A full disk is the run's to report."""
        now = self._clock()
        if (seen := self._progress()) != self._seen:
            self._seen, self._moved_at, self._cpu_then = seen, now, self._cpu()
            self._stall_due = self._first_due
        self._probe(now)
        with contextlib.suppress(OSError):
            if self._patience:
                self._report(now)
            if now >= self._snapshot_due:
                begun = time.thread_time()
                self._snapshot(wait_graph(registry.waits(), time.monotonic()), now)
                self._snapshot_due = now + max(SNAPSHOT_SECONDS, _SNAPSHOT_COST_RATIO * (time.thread_time() - begun))

    def _progress(self) -> tuple[int, int]:
        return registry.progress_count, self._heard

    @property
    def _first_due(self) -> float:
        return self._patience - min(_TICK, self._patience / 10)  # one round early is better than one late

    def _probe(self, now: float) -> None:
        """Ask the event loop for a sign of life; how long it owes one says how long it has been blocked."""
        if self._loop is not None and self._loop.is_closed():
            self._loop = self._asked = None
        if self._loop is None or self._asked is not None:
            return
        self._asked = now
        try:
            self._loop.call_soon_threadsafe(setattr, self, "_asked", None)
        except RuntimeError:  # it was closed just now
            self._asked = None

    def _blocked_seconds(self, now: float) -> float:
        asked = self._asked
        return 0.0 if asked is None else now - asked

    def _report(self, now: float) -> None:
        silent, unseen = now - self._moved_at, now - self._shown_at
        if silent >= self._stall_due:
            self._stall_due = _next_due(self._stall_due, self._patience)
            self._slow_due = _next_due(max(unseen, self._slow_due), self._patience)
            nodes = wait_graph(registry.waits(), time.monotonic())
            text = self._stall_text(nodes, silent, now)
            self._dump(text, nodes)
            self._monitor.note(text)
        elif unseen >= self._slow_due:
            self._slow_due = _next_due(self._slow_due, self._patience)
            moved = sum(self._seen) - sum(self._seen_at_show)
            doing = blocking_chain(wait_graph(registry.waits(), time.monotonic())) or self._phase or "working"
            self._monitor.phase(f"still at it after {format_seconds(unseen)}, {moved} things finished: {doing}")

    def _stall_text(self, nodes: list[Node], silent: float, now: float) -> str:
        blocked = self._blocked_seconds(now)
        cores = (self._cpu() - self._cpu_then) / max(silent, 1e-9)
        if self._loop_thread is not None and blocked > max(2 * _TICK, silent / 2):
            at = stack_summary(stack_of(self._loop_thread))
            what = f"the event loop has been blocked for {format_seconds(blocked)} by {at}, so that nothing moves"
        elif cores >= _BUSY_CORES:
            what = f"still computing ({cores:.1f} cores) though nothing has finished for {format_seconds(silent)}"
        else:
            what = f"nothing has moved for {format_seconds(silent)}"
        waits = blocking_chain(nodes) or self._phase or self._position()
        report = stalled_file(self._directory, self._part)
        part = f"{self._part}: " if self._part else ""
        return f"{part}{what}: {waits}; stacks are in {report}, and live with `paceline doctor {self._directory}`"

    def _position(self) -> str:
        """Where the process stands, for a stall in which no wait has a name."""
        if tasks := sorted(asyncio.all_tasks(self._loop), key=asyncio.Task.get_name) if self._loop else []:
            more = f", and {len(tasks) - 1} more wait" if len(tasks) > 1 else ""
            return f"the task `{tasks[0].get_name()}` waits at {stack_summary(stack_of(tasks[0]))}{more}"
        thread = self._loop_thread or threading.main_thread()
        return f"the thread `{thread.name}` is at {stack_summary(stack_of(thread))}"

    def _snapshot(self, nodes: list[Node], now: float) -> None:
        blocked = self._blocked_seconds(now)
        state = {
            "pid": os.getpid(),
            "born": "".join(process_stat(os.getpid())[19:20]),
            "host": socket.gethostname(),
            "part": self._part,
            "time": time.time(),
            "started": self._started_at,
            "step": self._step,
            "phase": self._phase,
            "quiet": now - self._moved_at,
            "cores": (self._cpu() - self._cpu_then) / max(now - self._moved_at, 1e-9),
            "blocked": blocked if blocked > 2 * _TICK else 0.0,
            "waits": nodes,
            "threads": thread_stacks(),
        }
        replace_file(waits_file(self._directory, self._part), [json.dumps(state).encode()], durable=False)

    def _dump(self, text: str, nodes: list[Node]) -> None:
        """The whole story, for a person: the sentence, the graph, all tasks and all threads."""
        lines = [time.strftime("%Y-%m-%d %H:%M:%S"), text, "", "who waits for whom", *format_graph(nodes)]
        for group in task_stacks(self._loop) if self._loop is not None else []:
            first, *others = group["names"]
            like = f" and {len(others)} like it" if others else ""
            lines += ["", f"task {first}{like}", *(f"    {line}" for line in group["stack"])]
        for group in thread_stacks():
            lines += ["", f"thread {', '.join(group['names'])}", *(f"    {line}" for line in group["stack"])]
        content = "\n".join([*lines, ""])
        replace_file(stalled_file(self._directory, self._part), [content.encode()], durable=False)


def format_graph(nodes: list[Node], parent: int | None = None, depth: int = 1) -> list[str]:
    """The graph as indented lines, each wait with the stack of its oldest."""
    lines: list[str] = []
    for index, node in enumerate(nodes):
        if node["parent"] == parent and depth < 20:
            stack = (f"    {line}" for line in node["stack"])
            lines += ["  " * depth + line for line in (f"{label(node)}, {node['who']}", *stack)]
            lines += format_graph(nodes, index, depth + 1)
    return lines


def process_stat(pid: int) -> list[str]:
    """A process in the kernel's words: its state first, and in the twentieth place when it began, so that a number that
    is used again has another. Empty if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _next_due(due: float, patience: float) -> float:
    return due + min(max(due, patience), _LONGEST_PATIENCE)
