"""A run as lines of text, where there is no terminal to draw on."""

import time
from collections.abc import Callable, Mapping
from typing import TextIO

from paceline.monitor.base import Monitor, RunOutcome, RunPlan, phase_kind
from paceline.monitor.history import Curve, MetricHistory
from paceline.monitor.text import amount, count, one_line, reasons, score, seconds

_HEARTBEAT = 10.0
"""Seconds of silence after which known work shows its progress again."""


class PlainLines(Monitor):
    """One short line a step; phases and notes as lines too.

    A log is read later and by others, so work that comes back every few steps is announced once, and again
    only when nothing else has been printed for a while.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._total: int | None = None
        self._kinds: set[str] = set()
        self._printed = clock()

    def begin(self, plan: RunPlan) -> None:
        self._total = plan.total_steps
        length = f", {amount(plan.total_steps, 'step')}" if plan.total_steps else ""
        start = f", going on after step {plan.start_step}" if plan.start_step else ""
        self._print(
            f"paceline {plan.name}: {', '.join(plan.envs)}; {count(plan.parameters)} parameters "
            f"on {plan.device}{length}{start}; writing to {plan.directory}"
        )

    def phase(self, text: str) -> None:
        kind = phase_kind(text)
        if kind not in self._kinds or self._clock() - self._printed > _HEARTBEAT:
            self._kinds.add(kind)
            self._print(f"... {one_line(text)}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._print(step_line(step, self._total, metrics))

    def note(self, text: str) -> None:
        self._print(f"note: {one_line(text)}")

    def end(self, outcome: RunOutcome) -> None:
        self._print(f"{outcome.status} at step {outcome.step}")

    def _print(self, line: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
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
        parts.append(f"{count(now.latest['tokens/s'])} tok/s")
    if "time/step" in now.latest:
        parts.append(seconds(now.latest["time/step"]))
    if lost := reasons(now.dropped):
        parts.append(f"dropped {lost}")
    return "  ".join(parts)


def _scores(label: str, curves: Mapping[str, Curve], digits: int) -> list[str]:
    """One number needs no name; several are told apart by their environments."""
    values = {env: score(curve[-1][1], digits) for env, curve in curves.items() if curve}
    if len(values) <= 1:
        return [f"{label} {value}" for value in values.values()]
    return [f"{label} " + ", ".join(f"{env} {value}" for env, value in values.items())]
