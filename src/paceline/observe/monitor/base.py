"""The `Monitor` interface to which a run reports its progress, and the fan-out to several monitors."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

Gauges = Callable[[], tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]]
"""Seconds that each engine has computed so far, episodes that each environment plays now, and what episodes wait for
now besides the engine, by kind."""


@dataclass(frozen=True)
class RunPlan:
    """The run that is about to start. `start_step` is 0 for a fresh run, the checkpoint's step for a resumed one."""

    name: str
    directory: Path
    total_steps: int | None
    start_step: int
    config: dict[str, Any]
    envs: tuple[str, ...]
    device: str
    parameters: int


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended, and what it left behind."""

    status: Literal["finished", "interrupted", "failed"]
    step: int
    message: str = ""
    checkpoint: Path | None = None
    export: Path | None = None
    frames: str = ""
    """Of a failure in user code: the traceback, cut to the user's frames."""
    trace: str = ""
    """Of a failure in user code or by a bug: the whole traceback."""


class Monitor:
    """Watches a run and does nothing; subclasses override what they need.

    phase* -> begin -> (phase | step | rollouts | played | tickets | spans | note | roll_back)* -> end -> close

    Phases and notes may come before `begin`, since a model is loaded before its size is known. Used as a
    context manager a monitor is closed on every way out, also when `end` was never called.
    """

    essential: ClassVar[bool] = False
    """Whether the run must stop when this monitor fails."""

    def begin(self, plan: RunPlan) -> None:
        """The run starts."""

    def phase(self, text: str) -> None:
        """Long work is under way: "loading model", "evaluating 37/128"."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A batch is finished. Steps count from 1; step 0 carries only `eval/*` of the untrained policy."""

    def rollouts(self, step: int, records: Sequence[dict[str, Any]]) -> None:
        """Some of the step's rollouts, as JSON-able records."""

    def batch(self, step: int, data: bytes) -> None:
        """A shipped batch with all its streams, encoded; only where the run file asks for them."""

    def tickets(self, records: Sequence[dict[str, Any]]) -> None:
        """Tickets changed their state."""

    def finished_rollouts(self, step: int, state: str, rollouts: Sequence[Any]) -> None:
        """All rollouts whose fate is known: `trained` in the batch `step`, `dropped:<reason>` on the way to it,
        `evaluated` after it. The run no longer changes them. Steps never fall, but for a roll-back."""

    def token_scores(self, step: int, scores: Any) -> None:
        """What the trainer computed for each token that the batch of this step trained, by the sample's place among
        those of `finished_rollouts`, which follow: the batch's own, then the replayed."""

    def spans(self, step: int, spans: Sequence[tuple[str, str, float, float]]) -> None:
        """The spans of a step's time: lane, kind, start and end in seconds since 1970."""

    def gauges(self, look: Gauges) -> None:
        """A callback that tells how busy engines and environments are, from any thread, until the next one is given."""

    def note(self, text: str) -> None:
        """A warning or an event the user should see."""

    def roll_back(self, step: int) -> None:
        """The run goes on from the checkpoint of this step: whatever came after it is undone."""

    def end(self, outcome: RunOutcome) -> None:
        """The run is over."""
        self.close()

    def close(self) -> None:
        """Let go of terminals, files and connections; safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Monitors(Monitor):
    """Forwards every event to several monitors, in order.

    A monitor that fails is reported once through `note` and gets no more events. An essential monitor (the recorder)
    is part of the run, so its failure is the run's.
    """

    def __init__(self, *monitors: Monitor) -> None:
        self._monitors = list(monitors)
        self._active = list(monitors)

    def add(self, monitor: Monitor) -> None:
        self._monitors.append(monitor)
        self._active.append(monitor)

    def end(self, outcome: RunOutcome) -> None:
        try:
            self._forward("end", outcome)
        finally:
            self.close()

    def close(self) -> None:
        """Closes all of them, the disabled ones too: they may still hold a file or a terminal."""
        failures: list[Exception] = []
        for monitor in self._monitors:
            try:
                monitor.close()
            except Exception as error:
                if monitor.essential:
                    failures.append(error)
                elif monitor in self._active:
                    self._disable(monitor, error)
        if failures:
            raise failures[0]

    def _forward(self, event: str, *arguments: Any) -> None:
        for monitor in tuple(self._active):
            try:
                getattr(monitor, event)(*arguments)
            except Exception as error:
                if monitor.essential:
                    raise
                self._disable(monitor, error)

    def _disable(self, monitor: Monitor, error: Exception) -> None:
        # Leave the list first: forwarding the note may disable a second one, but never this one again.
        if monitor in self._active:
            self._active.remove(monitor)
            reason = str(error) or type(error).__name__
            self.note(f"{type(monitor).__name__} failed and is off for the rest of this run: {reason}")


for _name, _member in vars(Monitor).items():
    if callable(_member) and not _name.startswith("_") and _name not in vars(Monitors):
        setattr(Monitors, _name, partialmethod(Monitors._forward, _name))


def phase_kind(text: str) -> str:
    """The phase without its counters: "evaluating 37/128" and "evaluating 38/128" are one kind."""
    return re.sub(r"[\d.,/%]+", "", text).strip()
