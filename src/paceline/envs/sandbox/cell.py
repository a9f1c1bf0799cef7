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
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
MAX_MESSAGE_CHARS = 500


def main() -> None:
    requests, answers = int(sys.argv[1]), int(sys.argv[2])
    lines = os.fdopen(requests, "r", encoding="utf-8")
    settings = json.loads(lines.readline())
    jail = runpy.run_path(f"{HERE}/jail.py")
    wire = runpy.run_path(f"{HERE}/wire.py")
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
    serve(Solution(settings["source"], wire["encode"], wire["decode"]), lines, answers)


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

    def __init__(self, source: str, encode: Any, decode: Any) -> None:
        self._source, self._encode, self._decode = source, encode, decode
        self._module = types.ModuleType("solution")  # not `__main__`: what a program does when started is not asked for
        self._objects: list[Any] = []

    def load(self) -> None:
        sys.modules["solution"] = self._module  # dataclasses look themselves up
        exec(compile(self._source, "solution.py", "exec"), self._module.__dict__)

    def get(self, ref: int | None, name: str) -> Any:
        return self._encode_result(getattr(self._module if ref is None else self._objects[ref], name))

    def call(self, ref: int, args: Any, kwargs: Any) -> Any:
        args, kwargs = (self._decode(data, self._objects.__getitem__) for data in (args, kwargs))
        return self._encode_result(self._objects[ref](*args, **kwargs))

    def _encode_result(self, value: Any) -> Any:
        return self._encode(value, self._store)

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


if __name__ == "__main__":
    main()
