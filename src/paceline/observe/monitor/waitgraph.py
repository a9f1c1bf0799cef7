"""The wait graph: who waits for whom, since when, with the stacks of tasks and threads.

Everything here may be called from a thread beside the event loop, and does not ask the loop for anything: a loop that
is blocked could not answer. Reading a suspended coroutine's frames is safe; one that moves on meanwhile shows an older
line, no more.
"""

import asyncio
import functools
import sys
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.observe.monitor.text import format_seconds
from paceline.util.deadlines import Wait, awaited_frames
from paceline.util.user_code import frames_of

Node = dict[str, Any]
"""Waits of one name below one parent: `what`, `count`, `age` and `limit` in seconds, `who`, `parent` (an index, or
None), `on`, and the `stack` of the oldest, innermost last."""

FRAMES = 12
_STDLIB = Path(asyncio.__file__).parent.parent
_HOPS = 8
"""Tasks that wait for tasks: how far they are followed."""


def wait_graph(waits: Iterable[Wait], now: float) -> list[Node]:
    """Open waits, oldest first, told by name and parent: twenty thousand episodes are one line with a count."""
    nodes: list[Node] = []
    at: dict[tuple[str, int | None], int] = {}
    places: dict[Wait, int] = {}
    for wait in waits:
        parent = wait.parent
        while parent is not None and parent.waiter is None:
            parent = parent.parent
        key = (wait.what, None if parent is None else places.get(parent))
        index = places[wait] = at.setdefault(key, len(nodes))
        if index == len(nodes):
            who = wait.waiter
            nodes.append(
                {
                    "what": wait.what,
                    "count": 0,
                    "parent": key[1],
                    "on": list(wait.waits_for),
                    "limit": wait.seconds,
                    "age": max(0.0, now - wait.since),
                    "who": "" if who is None else who.get_name() if isinstance(who, asyncio.Task) else who.name,
                    "stack": [] if who is None else stack_of(who),
                }
            )
            if key[1] is not None and nodes[key[1]]["stack"] == nodes[index]["stack"]:
                nodes[key[1]]["stack"] = []  # one task in two waits stands at one place
        nodes[index]["count"] += 1
    # Put each wait without a parent below the innermost wait whose `on` names its like.
    for index, node in enumerate(nodes):
        if node["parent"] is None:
            above = (
                at
                for at, other in reversed(list(enumerate(nodes)))
                if any(node["what"].startswith(name) for name in other["on"]) and not _is_below(nodes, at, index)
            )
            node["parent"] = next(above, None)
    return nodes


def stack_of(who: "asyncio.Task[Any] | threading.Thread") -> list[str]:
    """Where it stands, innermost last; through tasks that wait for other tasks."""
    if isinstance(who, threading.Thread):
        return format_frames(frames_of(sys._current_frames().get(who.ident or -1)))
    found: list[FrameType] = []
    seen: set[int] = set()
    task: asyncio.Future[Any] | None = who
    while isinstance(task, asyncio.Task) and id(task) not in seen and len(seen) < _HOPS:
        seen.add(id(task))
        found += awaited_frames(task.get_coro())
        task = _awaited_future(getattr(task, "_fut_waiter", None))
    return format_frames(found)


def thread_stacks() -> list[dict[str, Any]]:
    """Every thread but the one that asks; those that stand at the same place are one entry."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    return _by_stack((names.get(ident, f"thread {ident}"), frames_of(frame)) for ident, frame in frames.items())


def task_stacks(loop: asyncio.AbstractEventLoop) -> list[dict[str, Any]]:
    """All tasks of a loop by where they stand, most numerous first. Too slow for every snapshot."""
    try:
        found = _by_stack((task.get_name(), awaited_frames(task.get_coro())) for task in asyncio.all_tasks(loop))
    except RuntimeError:  # they came and went while they were listed, so nothing is stuck there
        return []
    return sorted(found, key=lambda group: -len(group["names"]))


def _by_stack(running: Iterable[tuple[str, Iterable[FrameType]]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, frames in running:
        groups.setdefault(tuple(format_frames(frames)), []).append(name)
    return [{"names": sorted(names), "stack": list(stack)} for stack, names in groups.items()]


def blocking_chain(nodes: list[Node]) -> str:
    """One clause: the longest wait without a parent, what it waits for, and so on down.

    >>> blocking_chain([{"what": "sampling", "count": 1, "age": 65, "limit": None, "parent": None},
    ...        {"what": "an episode of `code`", "count": 8, "age": 64.2, "limit": 300, "parent": 0}])
    'sampling (65 s) waits for 8 x an episode of `code` (64 s of 300 s)'
    """
    parts: list[str] = []
    at: int | None = None
    while len(parts) < _HOPS and (below := [index for index, node in enumerate(nodes) if node["parent"] == at]):
        at = max(below, key=lambda index: _explanation_rank(nodes, index))
        parts.append(label(nodes[at]))
    return ", which waits for ".join(parts).replace(", which", "", 1)


def label(node: Node) -> str:
    """`8 x an episode (64 s of 300 s)`."""
    limit = "" if node["limit"] is None else f" of {node['limit']:g} s"
    count = "" if node["count"] == 1 else f"{node['count']} x "
    return f"{count}{node['what']} ({format_seconds(node['age'])}{limit})"


def stack_summary(stack: list[str]) -> str:
    """Where that is, in a word: the last line that is not the standard library's, and the very last.

    >>> stack_summary(["my/reward.py:12 score", "python/threading.py:331 wait"])
    'my/reward.py:12 score (in python/threading.py:331 wait)'
    """
    if not stack:
        return "something without a Python frame"
    ours = next((line for line in reversed(stack) if not line.startswith("python/")), stack[-1])
    return ours if ours == stack[-1] else f"{ours} (in {stack[-1]})"


def format_frames(frames: Iterable[FrameType]) -> list[str]:
    return [f"{_short(f.f_code.co_filename)}:{f.f_lineno} {f.f_code.co_name}" for f in deque(frames, FRAMES)]


def _explanation_rank(nodes: list[Node], index: int) -> tuple[bool, int, float]:
    """How much a path through this one explains. A wait without a limit and a parent is a phase of the run, which the
    rest is done for; then the one with most below it, and the oldest."""
    node = nodes[index]
    below = sum(_is_below(nodes, other, index) for other in range(len(nodes)))
    return node["limit"] is None and node["parent"] is None, below, node["age"]


def _is_below(nodes: list[Node], index: int | None, top: int) -> bool:
    while index is not None:
        if index == top:
            return True
        index = nodes[index]["parent"]
    return False


def _awaited_future(future: "asyncio.Future[Any] | None") -> "asyncio.Future[Any] | None":
    """What is awaited: of a `gather`, the first that is not done."""
    future = getattr(future, "awaited", future)  # user code's, in the place of which its end is awaited
    children = getattr(future, "_children", None)
    return future if not children else next((child for child in children if not child.done()), None)


@functools.cache
def _short(file: str) -> str:
    """The part of a path that a reader knows; the standard library's is `python/...`."""
    path = Path(file)
    if path.is_relative_to(_STDLIB) and "site-packages" not in path.parts:
        return str("python" / path.relative_to(_STDLIB))
    for mark in ("site-packages", "src"):
        if mark in path.parts:
            return str(Path(*path.parts[path.parts.index(mark) + 1 :]))
    return str(Path(*path.parts[-2:]))
