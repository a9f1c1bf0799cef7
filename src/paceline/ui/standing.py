"""How one run stands: what the pages of a run are told first, and again whenever it changes."""

from dataclasses import asdict
from typing import Any

from paceline.record import RunFolder
from paceline.ui.vitals import tags

MOST_EVENTS = 500
"""A run that notes something each second for a week has more than a page can hold."""


def standing(run: RunFolder, patient: bool) -> dict[str, Any]:
    """Status, staleness allowed, the last events and what could not be read; all of that only for who is patient."""
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
