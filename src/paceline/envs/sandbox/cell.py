"""Runs a solution in a process of its own and answers the grader's calls with plain data.

Run as a file by `grader.py`, without site-packages and with an empty environment; two pipes are all it shares with
others. It forks once: the child runs the solution, and the parent, which the solution cannot reach, waits to kill it.
"""

# pathlib takes a while to import, and this is on the way to every check.
# ruff: noqa: PTH100, PTH109, PTH120

import json
import os
import runpy
import shutil
import signal
import sys
import types
from collections import deque
from collections.abc import Callable, ItemsView, KeysView, ValuesView
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
MAX_MESSAGE_CHARS = 500


def main() -> None:
    requests, answers = int(sys.argv[1]), int(sys.argv[2])
    lines = os.fdopen(requests, "r", encoding="utf-8")
    settings = json.loads(lines.readline())
    jail = runpy.run_path(f"{HERE}/jail.py")
    work = os.getcwd()
    try:
        if settings["jailed"]:
            jail["enter_namespaces"](work, 4 * settings["limits"]["file_mb"])
    except OSError as error:
        return send(answers, ["no jail", str(error)])
    send(answers, ["ready"])
    child = os.fork()
    if child:
        os.close(requests)
        os.close(answers)
        watch(child, settings["parent"], None if settings["jailed"] else work, jail["die_with_parent"])
    os.environ.clear()
    if settings["jailed"]:
        jail["drop_privileges"]()
        jail["die_with_parent"](signal.SIGKILL)
    jail["set_limits"](**settings["limits"])
    if not settings["jailed"]:
        os.environ["TMPDIR"] = work
        jail["install_guard"](work)
    serve(Solution(settings["source"]), lines, answers)


def watch(child: int, parent: int, work: str | None, die_with_parent: Any) -> None:
    """Outlive the solution, or end it when the grader says so or is gone; then only this process clears its folder."""

    def end(*_: object) -> None:
        os.kill(child, signal.SIGKILL)
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        end()
    os.waitpid(child, 0)  # unbounded: the grader has the clock, and sends SIGTERM
    os._exit(0)


class Solution:
    """The program under test, and the objects of it that the grader holds references to."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._module = types.ModuleType("solution")  # not `__main__`: what a program does when started is not asked for
        self._objects: list[Any] = []

    def load(self) -> None:
        sys.modules["solution"] = self._module  # dataclasses look themselves up
        exec(compile(self._source, "solution.py", "exec"), self._module.__dict__)

    def get(self, ref: int | None, name: str) -> Any:
        return encode(getattr(self._module if ref is None else self._objects[ref], name), self._store)

    def call(self, ref: int, args: Any, kwargs: Any) -> Any:
        args, kwargs = (decode(data, self._objects.__getitem__) for data in (args, kwargs))
        return encode(self._objects[ref](*args, **kwargs), self._store)

    def _store(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1


def serve(solution: Solution, lines: Any, answers: int) -> None:
    """Answer requests until there are no more. A solution may write here what it likes: it only answers for itself."""
    send(answers, attempt(solution.load))
    for line in lines:
        what, *rest = json.loads(line)
        send(answers, attempt(solution.get if what == "get" else solution.call, *rest))


def send(answers: int, answer: list[Any]) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(answers, data) :]


def attempt(action: Any, *args: Any) -> list[Any]:
    """The value it returned, or what it raised: the nearest of Python's own exceptions, which the grader knows too."""
    try:
        return ["value", action(*args)]
    except BaseException as error:
        known = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return ["raised", known.__name__, str(error)[:MAX_MESSAGE_CHARS]]


# --- Python values as JSON: plain data by value, all else as a reference that stays on its side
#
# What is decoded is built from Python's own types, whatever it was made from. An object that claims to equal everything
# arrives as a reference that equals nothing, and a subclass of `int` as an `int`.

MAX_SAFE_INT = 1 << 53
"""Larger integers travel as text: Python refuses to read very long ones from JSON."""
LIST_TYPES = (list, range, deque, KeysView, ValuesView, ItemsView)
COLLECTION_TYPES = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, refer: Callable[[Any], int]) -> Any:
    """A value for JSON. `refer` keeps what is no plain data and gives it a number. Iterators are read to their end."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return int(value) if -MAX_SAFE_INT < value < MAX_SAFE_INT else {"int": hex(value)}
    if isinstance(value, LIST_TYPES) or hasattr(value, "__next__"):
        return [encode(item, refer) for item in value]
    for name, kind in COLLECTION_TYPES.items():
        if isinstance(value, kind):
            return {name: [encode(item, refer) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, refer), encode(item, refer)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return {"ref": refer(value)}


def decode(data: Any, deref: Callable[[int], Any]) -> Any:
    """The value again. `deref` finds what a number stands for."""
    if isinstance(data, list):
        return [decode(item, deref) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, inside),) = data.items()
    match name:
        case "tuple" | "set" | "frozenset":
            return COLLECTION_TYPES[name](decode(item, deref) for item in inside)
        case "dict":
            return {decode(key, deref): decode(item, deref) for key, item in inside}
        case "int":
            return int(inside, 16)
        case "bytes":
            return bytes.fromhex(inside)
        case "complex":
            return complex(*inside)
        case "ref":
            return deref(inside)
    raise ValueError(f"`{name}` is no kind of value")


if __name__ == "__main__":
    main()
