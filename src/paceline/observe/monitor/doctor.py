"""Diagnoses a run from its directory alone, while it lives and after it died."""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text
from rich.tree import Tree

from paceline.errors import PacelineError
from paceline.observe.monitor.directory import RunDirectory, read_valid_jsonl
from paceline.observe.monitor.summary import next_action
from paceline.observe.monitor.text import format_seconds, one_line
from paceline.observe.monitor.waitgraph import Node, label
from paceline.observe.monitor.watchdog import SNAPSHOT_SECONDS, process_stat, stalled_file

_STALE_SECONDS = 10 * SNAPSHOT_SECONDS
"""Age from which a snapshot says that something keeps the watchdog itself from its work."""
_LAST_EVENTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    run: Path
    verdict: str
    alive: bool
    finished: bool
    step: int | None
    parts: list[dict[str, Any]]
    """Snapshots, one a process, with their `age` and the `state` of the process."""
    events: list[dict[str, Any]]
    checkpoint: Path | None
    stall_reports: list[tuple[Path, float]]
    problems: list[str]
    """What could not be read, each as a sentence."""


def diagnose(run: Path, now: Callable[[], float] = time.time) -> Findings:
    """Look at a run directory; a `PacelineError` if it is none."""
    files = RunDirectory(run)
    if not (files.config_file.is_file() or files.lock_file.is_file()):
        raise PacelineError(f"there is no run at {run}: name a run directory, such as runs/quickstart")
    events, problems = read_valid_jsonl(files.events_file, {"event": str, "time": int | float})
    marks = [event for event in events if event["event"] in ("begin", "end")]
    ended = marks[-1] if marks and marks[-1]["event"] == "end" else None
    parts = [_part(path, now()) for path in sorted(run.glob("waits*.json"))]
    lead = next((part for part in parts if not part["part"]), None)
    holder = "" if lead or not files.lock_file.is_file() else files.lock_file.read_text().strip()
    pid = lead["pid"] if lead else int(holder) if holder.isdigit() else None
    state = lead["state"] if lead else ("gone" if ended or pid is None else _state(pid))
    metrics, more = read_valid_jsonl(files.metrics_file, {"step": int})
    step = lead["step"] if lead and lead["step"] is not None else metrics[-1]["step"] if metrics else None
    reports = [stalled_file(run), *sorted(run.glob("stalled-*.txt"))]
    last = max([lead["time"] if lead else 0.0, *(event["time"] for event in events[-1:])])
    seen = f", after a last sign of life {format_seconds(now() - last)} ago" if last else ""
    return Findings(
        run=run,
        verdict=_verdict(ended, pid, state, lead, "" if marks else " before its first step", seen),
        alive=state in ("runs", "suspended", "elsewhere"),
        finished=ended is not None and ended.get("status") == "finished",
        step=step,
        parts=parts,
        events=[event for event in events if event["event"] in ("note", "phase")][-_LAST_EVENTS:],
        checkpoint=files.newest_checkpoint(),
        stall_reports=[(path, now() - path.stat().st_mtime) for path in reports if path.is_file()],
        problems=problems + more,
    )


def render_findings(found: Findings) -> RenderableType:
    facts = Table.grid(Column(style="bold", no_wrap=True), Column(), padding=(0, 2))
    facts.add_row("run", Text(str(found.run)))
    facts.add_row("state", Text(found.verdict, "green" if found.alive or found.finished else "yellow"))
    facts.add_row("step", Text("none yet" if found.step is None else str(found.step)))
    for part in found.parts:
        facts.add_row(part["part"] or "process", Text(_process_line(part)))
    for path, age in found.stall_reports:
        facts.add_row("stalled", Text(f"{format_seconds(age)} ago: {path} has the stacks of all tasks and threads"))
    for problem in found.problems:
        facts.add_row("unreadable", Text(problem, "yellow"))
    facts.add_row("checkpoint", Text(str(found.checkpoint or "none yet")))
    events = Table.grid(padding=(0, 2))
    for event in found.events:
        at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        events.add_row(Text(at, "dim"), Text(event["event"]), Text(one_line(str(event.get("text", "")))))
    last = [Text(), Text("last events", "bold"), events] if found.events else []
    return Group(facts, *(tree for part in found.parts for tree in _trees(part)), *last)


def resume_command(found: Findings) -> str:
    """The command that resumes the run; empty where the run is alive or finished."""
    if found.alive or found.finished:
        return ""
    return next_action(RunDirectory(found.run), found.checkpoint, bool(found.step))[1]


def _verdict(
    ended: dict[str, Any] | None, pid: int | None, state: str, lead: dict[str, Any] | None, when: str, seen: str
) -> str:
    if state == "elsewhere" and lead:
        return f"on {lead['host']}, process {pid}: from here only its files can be seen"
    if state == "suspended":
        return f"suspended: process {pid} was stopped by a signal; `kill -CONT {pid}` lets it go on"
    if state == "runs":
        if lead and lead["age"] > _STALE_SECONDS:
            silence = f"has written nothing for {format_seconds(lead['age'])}"
            return f"process {pid} lives, but {silence}: its disk or its machine hangs"
        return f"runs as process {pid}"
    if ended and not lead:
        message = ended.get("message")
        return f"{ended.get('status')} at step {ended.get('step')}" + (f": {message}" if message else "")
    if pid is None:
        return "never started"
    cause = "(SIGKILL, out of memory, or the machine stopped)"
    return f"killed{when}: process {pid} is gone and wrote no end {cause}{seen}"


def _part(path: Path, now: float) -> dict[str, Any]:
    try:
        part = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PacelineError(f"{path} cannot be read ({error}): look again in a moment, or remove it") from None
    return part | {"age": max(0.0, now - part["time"]), "state": _state(part["pid"], part["born"], part["host"])}


def _state(pid: int, birth: str = "", host: str | None = None) -> str:
    """`runs`, `suspended`, `gone`, or `elsewhere` on a machine whose processes cannot be seen."""
    if host is not None and host != socket.gethostname():
        return "elsewhere"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass  # another user's process, which exists
    stat = process_stat(pid)
    if not stat:
        return "runs"  # no /proc here: the number is all we know
    if stat[0] in "ZX" or (birth and [birth] != stat[19:20]):
        return "gone"
    return "suspended" if stat[0] in "Tt" else "runs"


def _process_line(part: dict[str, Any]) -> str:
    """One line about a process: which it is, how old the news are, what moves."""
    words = [f"{part['pid']} on {part['host']}", part["state"], f"seen {format_seconds(part['age'])} ago"]
    if part["phase"]:
        words.append(one_line(part["phase"]))
    words.append(f"last progress {format_seconds(part['quiet'])} before that")
    if part["quiet"] > 5:
        words.append(f"{part['cores']:.1f} cores busy since")
    if part["blocked"]:
        words.append(f"event loop blocked for {format_seconds(part['blocked'])}")
    return ", ".join(words)


def _trees(part: dict[str, Any]) -> list[RenderableType]:
    title = f"who waits for whom{' in the ' + part['part'] if part['part'] else ''}"
    waits = Tree(Text(title, "bold"))
    if not part["waits"]:
        waits.add(Text("no wait with a name is open", "dim"))
    _add_waits(waits, part["waits"], None)
    threads = Tree(Text("threads", "bold"))
    for group in part["threads"]:
        _add_branch(threads, Text(", ".join(group["names"])), group["stack"][-3:])
    return [Text(), waits, Text(), threads]


def _add_waits(tree: Tree, nodes: list[Node], parent: int | None) -> None:
    for index, node in enumerate(nodes):
        if node["parent"] == parent:
            title = Text.assemble(label(node), (f"  {node['who']}", "dim"))
            _add_waits(_add_branch(tree, title, node["stack"][-4:]), nodes, index)


def _add_branch(tree: Tree, title: Text, stack: list[str]) -> Tree:
    branch = tree.add(title)
    for line in stack:
        branch.add(Text(line, "dim"))
    return branch
