"""Runs replays, one child process at a time for each run, and keeps the last few results."""

import hashlib
import json
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

from paceline.record import RunFolder
from paceline.ui.answers import refuse
from paceline.ui.replay.process import LIMIT_SECONDS, ReplayProcess
from paceline.ui.replay.result import ReplayResult
from paceline.ui.replay.settings import Value, flags, own_code

MOST = 6
"""Results that are remembered, of all runs together."""


class RecentResults:
    """The last few results, by run and name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: OrderedDict[tuple[Path, str], ReplayResult] = OrderedDict()

    def put(self, path: Path, key: str, result: ReplayResult) -> None:
        with self._lock:
            self._results[path, key] = result
            self._results.move_to_end((path, key))
            while len(self._results) > MOST:
                self._results.popitem(last=False)

    def get(self, path: Path, key: str) -> ReplayResult | None:
        with self._lock:
            found = self._results.get((path, key))
            if found is not None:
                self._results.move_to_end((path, key))
            return found

    def of(self, path: Path) -> dict[str, ReplayResult]:
        """Those of one run, the newest last."""
        with self._lock:
            return {key: result for (where, key), result in self._results.items() if where == path}


class ReplayRunner:
    """Lives as long as the app, and its children no longer than it."""

    def __init__(self, limit: float = LIMIT_SECONDS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._children: dict[Path, tuple[str, ReplayProcess]] = {}
        self.kept = RecentResults()
        self.close = weakref.finalize(self, _end, self._children)

    def start(self, run: RunFolder, step: int, changes: dict[str, Value]) -> dict[str, Any]:
        """Replay a step, with some settings changed; refused while another replay of the run goes on."""
        config = run.config()
        if not config:
            raise refuse(409, "the run has no run file that can be read, so its model and loss are unknown")
        if reason := own_code(config):
            raise refuse(409, f"{reason}: paceline replay {run.path} {step}")
        if step not in run.batches():
            raise refuse(404, f"the samples of step {step} are not kept")
        written = flags(run.path / "config.toml", config, changes)
        key, path, kept = name_of(step, changes), run.path, self.kept  # a child must not hold on to the desk

        def finished(data: bytes) -> None:
            kept.put(path, key, ReplayResult(data, step, changes))

        with self._lock:
            _, before = self._children.get(run.path, ("", None))
            if before is not None and before.state == "working":
                raise refuse(409, "a step of this run is being replayed already: wait for it, or cancel it")
            self._children[run.path] = key, ReplayProcess(run.path, step, written, finished, self._limit)
        return self.job(run) or {}

    def cancel(self, run: RunFolder) -> None:
        _, child = self._children.get(run.path, ("", None))
        if child is not None:
            child.cancel()

    def job(self, run: RunFolder) -> dict[str, Any] | None:
        """The run's last replay: how it stands, and the name of what came of it."""
        key, child = self._children.get(run.path, ("", None))
        if child is None:
            return None
        return {
            "key": key,
            "step": child.step,
            "state": child.state,
            "doing": child.doing(),
            "failure": child.failure,
            "seconds": child.seconds,
            "limit": self._limit,
        }


def name_of(step: int, changes: dict[str, Value]) -> str:
    """The same for the same step and settings, so that an address can hold it."""
    if not changes:
        return str(step)
    written = json.dumps(changes, sort_keys=True)
    return f"{step}-{hashlib.sha256(written.encode()).hexdigest()[:10]}"


def _end(children: dict[Path, tuple[str, ReplayProcess]]) -> None:
    for _, child in list(children.values()):
        child.cancel()
