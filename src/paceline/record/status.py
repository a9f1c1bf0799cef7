"""Determines the status of a run from its directory alone."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.monitor.directory import RunDirectory
from paceline.monitor.watchdog import waits_file

State = Literal["starting", "running", "finished", "interrupted", "failed", "crashed"]
_ELSEWHERE_SECONDS = 60.0
"""A run on another machine whose folder is shared counts as alive while its snapshot is not older than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of a run."""

    state: State
    """`crashed`: no process holds its lock, and it did not say how it ended."""
    step: int
    total_steps: int | None
    began: float | None
    """When it was begun or last resumed, in seconds since 1970."""
    ended: float | None
    message: str
    device: str
    parameters: int | None
    alive: bool


def status(run: RunDirectory, events: Sequence[dict[str, Any]], last_step: int) -> RunStatus:
    """Read from the events, and from whether a process holds the run's lock."""
    living = alive(run)
    marks = [event for event in events if event.get("event") in ("begin", "end")]
    begin = next((event for event in reversed(marks) if event["event"] == "begin"), {})
    end = marks[-1] if marks and marks[-1]["event"] == "end" else None
    # While a process holds the lock, an end that is not the last word belongs to an earlier life.
    over = end if end is not None and (not living or events[-1] is end) else None
    state: State
    if over is not None and (how := over.get("status")) in ("finished", "interrupted", "failed"):
        state = how
    elif living:
        state = "running" if begin and end is None else "starting"
    else:
        state = "crashed"
    return RunStatus(
        state=state,
        step=last_step if over is None else max(last_step, _whole(over.get("step")) or 0),
        total_steps=_whole(begin.get("total_steps")),
        began=_number(begin.get("time")),
        ended=_number(over.get("time")) if over is not None else None,
        message=str(over.get("message") or "") if over is not None else "",
        device=str(begin.get("device") or ""),
        parameters=_whole(begin.get("parameters")),
        alive=living,
    )


def alive(run: RunDirectory) -> bool:
    """Whether a process leads this run now, here or on a machine that shares the folder."""
    return _locked(run.lock_file) or _seen_elsewhere(waits_file(run.root))


def _locked(path: Path) -> bool:
    """The kernel's list of locks says so without touching the lock, which would block a process that wants it. Some
    file systems have another device there; then the process in the file must be the one in the list."""
    try:
        status, holder = path.stat(), path.read_text(errors="replace").strip()
    except OSError:
        return False
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    try:
        held = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return _refused(path)
    for _, kind, *_, process, file, _, _ in (fields for fields in held if len(fields) >= 8):
        where, _, inode = file.rpartition(":")
        if kind == "FLOCK" and inode == str(status.st_ino) and (where == device or process == holder):
            return True
    return False


def _refused(path: Path) -> bool:
    """Where there is no such list: ask for the lock, and give it back at once."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _seen_elsewhere(snapshot: Path) -> bool:
    try:
        seen = json.loads(snapshot.read_text())
        elsewhere = seen["host"] != socket.gethostname()
        return elsewhere and time.time() - seen["time"] < _ELSEWHERE_SECONDS
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
