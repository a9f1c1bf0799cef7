"""Live updates: finds what has changed in a run since a page last read it.

A mark names how far a page has read: the file (a roll-back replaces it by another) and the lines of it. With it a page
that lost its connection gets what it missed, and one whose run was rolled back gets everything anew.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from paceline.record import RunFolder
from paceline.ui.runs import Runs, signature
from paceline.ui.vitals import tags

MOST_EVENTS = 500
"""A run that notes something each second for a week has more than a page can hold."""


def standing(run: RunFolder, patient: bool) -> dict[str, Any]:
    """Status, staleness allowed, the last events and what could not be read; of a long journal only with `patient`."""
    config, events = run.config(), run.events()
    return {
        "path": str(run.path),
        "status": asdict(run.status()),
        "staleness": config.get("staleness"),
        "tags": tags(config),
        "events": events[-MOST_EVENTS:],
        "events_left_out": max(0, len(events) - MOST_EVENTS),
        "problems": run.problems(patient),
    }


GROWING = ("tickets.jsonl", "rollouts.jsonl", "record/rollouts.index", "record/lanes.index")
"""Files whose size a page is told, so that it can ask for what is new."""

News = tuple[str, Any, str]
"""The event's name, what it says, and the mark to go on from; empty where there is none."""


def read_metrics(run: RunFolder, mark: str = "") -> tuple[dict[str, Any], str]:
    """The columns since a mark, whether they replace what was read before, and the new mark."""
    file, _, lines = mark.partition(":")
    here = str(signature(run.path / "metrics.jsonl")[0])
    columns = run.metrics()
    count = len(columns["step"])
    start = int(lines) if file == here and lines.isdecimal() and int(lines) <= count else 0
    return {
        "columns": {name: values[start:] for name, values in columns.items()},
        "fresh": start == 0,
    }, f"{here}:{count}"


class RunNews:
    """Follows one run for one page."""

    def __init__(self, run: RunFolder, mark: str) -> None:
        self._run = run
        self._mark = mark
        self._seen: dict[str, Any] = {}

    def look(self) -> Iterator[News]:
        """The news. Reads only what has changed; the status always, since a process dies without writing. What takes
        long waits for the second look: at the first the page is still being drawn."""
        root, patient = self._run.path, bool(self._seen)
        if not root.is_dir():
            if self._changed("gone", True):
                yield "gone", {}, ""
            return
        if self._changed("metrics", signature(root / "metrics.jsonl")):
            told, mark = read_metrics(self._run, self._mark)
            if mark != self._mark:
                self._mark = mark
                yield "metrics", told, mark
        news = self._changed("events", [signature(root / name) for name in ("events.jsonl", "config.toml")])
        if news or (self._changed("patient", patient) and self._run.problems(patient) != self._seen["problems"]):
            told = standing(self._run, patient)
            self._seen |= {"status": told["status"], "problems": told["problems"]}
            yield "standing", told, ""
        elif self._changed("status", asdict(self._run.status())):
            yield "status", self._seen["status"], ""
        sizes = {name: signature(root / name)[1] for name in GROWING}
        if self._changed("files", sizes):
            yield "files", sizes, ""

    def _changed(self, what: str, value: Any) -> bool:
        before, self._seen[what] = self._seen.get(what), value
        return before != value


class FolderNews:
    """Follows the table of runs for one page."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._told: dict[str, dict[str, Any]] = {}

    def look(self) -> Iterator[News]:
        """The runs that are new or have changed, and the names of those that went."""
        before, self._told = self._told, self._runs.vitals(patient=bool(self._told))
        changed = [told for name, told in self._told.items() if told != before.get(name)]
        gone = [name for name in before if name not in self._told]
        if changed or gone:
            yield "runs", {"changed": changed, "gone": gone}, ""
