"""Writes metrics, rollouts, tickets and events as append-only JSON lines in the run directory."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from paceline.observe.monitor.base import Monitor, RunOutcome, RunPlan, phase_kind
from paceline.observe.monitor.directory import RunDirectory, append_jsonl, drop_torn_line, filter_jsonl, replace_file


class RunRecorder(Monitor):
    """Writes `metrics.jsonl`, `rollouts.jsonl`, `tickets.jsonl` and `events.jsonl`.

    Nothing is held open or buffered here, so there is nothing to lose and nothing to close. After a roll-back
    the lines of the undone steps go: the checkpoint is the truth, and the files must tell the same story.
    """

    essential: ClassVar[bool] = True

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time, keep_batches: int = 0) -> None:
        self._files = RunDirectory(directory)
        self._keep_batches = keep_batches
        self._clock = clock
        self._kind = ""
        files = self._files
        for path in (files.metrics_file, files.rollouts_file, files.tickets_file, files.events_file):
            drop_torn_line(path)

    def begin(self, plan: RunPlan) -> None:
        self._rewind(plan.start_step)
        self._event("begin", **_fields(plan, "name", "start_step", "total_steps", "device", "parameters"))

    def phase(self, text: str) -> None:
        # A counter that moves is no event; a new kind of work is.
        if (kind := phase_kind(text)) != self._kind:
            self._kind = kind
            self._event("phase", text=text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        append_jsonl(self._files.metrics_file, [{"step": step, "time": self._clock(), **metrics}])

    def rollouts(self, step: int, records: Sequence[dict[str, Any]]) -> None:
        append_jsonl(self._files.rollouts_file, ({"step": step, **record} for record in records))

    def batch(self, step: int, data: bytes) -> None:
        self._files.batches.mkdir(exist_ok=True)
        replace_file(self._files.batches / f"step-{step:06d}.msgpack", [data])
        for old in sorted(self._files.batches.glob("step-*.msgpack"))[: -self._keep_batches]:
            old.unlink()

    def tickets(self, records: Sequence[dict[str, Any]]) -> None:
        append_jsonl(self._files.tickets_file, records)

    def note(self, text: str) -> None:
        self._event("note", text=text)

    def roll_back(self, step: int) -> None:
        self._rewind(step)
        self._event("roll_back", step=step)

    def end(self, outcome: RunOutcome) -> None:
        traces = {"frames": outcome.frames, "traceback": outcome.trace}
        fields = _fields(outcome, "status", "step", "message", "checkpoint", "export")
        self._event("end", **fields, **{name: trace for name, trace in traces.items() if trace})

    def _event(self, event: str, **fields: Any) -> None:
        append_jsonl(self._files.events_file, [{"time": self._clock(), "event": event, **fields}])

    def _rewind(self, start_step: int) -> None:
        def kept(record: dict[str, Any]) -> bool:
            return _count(record, "step") <= start_step

        def kept_ticket(record: dict[str, Any]) -> bool:
            if "since" in record:  # the checkpoint it came after
                return _count(record, "since") < start_step
            return record.get("state") != "trained" or _count(record, "step") <= start_step

        # A fresh start evaluates the untrained policy again, so not even step 0 of an earlier try stays.
        for path in (self._files.metrics_file, self._files.rollouts_file):
            filter_jsonl(path, kept) if start_step else path.unlink(missing_ok=True)
        filter_jsonl(self._files.tickets_file, kept_ticket)
        for path in self._files.batches.glob("step-*.msgpack"):
            if path.stem > f"step-{start_step:06d}":
                path.unlink()
        for draft in self._files.batches.glob(".step-*.tmp"):  # of one that was killed while it wrote
            draft.unlink(missing_ok=True)


def _fields(source: object, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _count(record: Mapping[str, Any], name: str) -> int:
    """0 where it is missing, or damaged."""
    value = record.get(name)
    return value if isinstance(value, int) else 0
