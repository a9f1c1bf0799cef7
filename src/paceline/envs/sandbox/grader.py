"""Runs the hidden tests of a solution, in a worker; the solution itself runs in a cell (see `__init__.py`).

Loaded as a file, so that a worker does not import torch.
"""

import ast
import builtins
import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

from paceline.util.importing import import_object
from paceline.util.private_folder import PrivateFolder

HERE = Path(__file__).parent
encode: Callable = import_object(f"{HERE / 'cell.py'}:encode")
decode: Callable = import_object(f"{HERE / 'cell.py'}:decode")

ANSWER_BYTES = 1 << 20
# Raised inside `map` or a generator these end it early and quietly, and `all` of nothing is true.
SILENT_ERRORS = (StopIteration, StopAsyncIteration)


class CellError(Exception):
    """A cell that gave no valid answer: it is dead, late, or sent invalid data."""


class NoJail(Exception):
    """The kernel allows no namespaces here."""


_without_namespaces = False
"""The kernel forbids namespaces, as this worker has found out."""


def grade(
    source: str, tests: list[str], entry_point: str | None, stop_at_failure: bool, sandbox: str, limits: dict[str, Any]
) -> dict[str, Any]:
    """How many tests a solution passes; with `stop_at_failure` it ends at the first that fails. `jailed` says whether
    it ran in kernel namespaces or only under the interpreter's guard. `no_jail`, instead, says why it was not run."""
    global _without_namespaces
    count = partial(_count_passed, source, tests, entry_point, stop_at_failure, limits)
    if sandbox == "kernel" or (sandbox == "auto" and not _without_namespaces):
        try:
            return {"passed": count(jailed=True), "jailed": True}
        except NoJail as error:
            _without_namespaces = True
            if sandbox == "kernel":
                return {"no_jail": str(error)}
    return {"passed": count(jailed=False), "jailed": False}


def _count_passed(
    source: str, tests: list[str], entry_point: str | None, stop_at_failure: bool, limits: dict[str, Any], jailed: bool
) -> int:
    deadline = time.monotonic() + limits["seconds"]
    passed, rest = 0, list(tests)
    while rest and time.monotonic() < deadline:
        with open_cell(source, limits, jailed, deadline) as cell:
            if not cell.loaded:
                return passed
            while rest and cell.alive:
                good = passes(rest.pop(0), entry_point, cell)
                passed += good
                if stop_at_failure and not good:
                    return passed
    return passed


def passes(test: str, entry_point: str | None, cell: "Cell") -> bool:
    """Whether a test runs to its end. One that never calls the solution says nothing about it."""
    requests_before = cell.request_count
    try:
        tree = ast.parse(test)
        names: dict[str, Any] = {"__name__": "tests"} | test_namespace(tree, entry_point, cell)
        exec(compile(tree, "tests", "exec"), names)
        if entry_point is not None and callable(names.get("check")) and not calls(tree, "check"):
            names["check"](names[entry_point])
    except (Exception, SystemExit):  # a failing assertion, or whatever a wrong answer leads to
        return False
    return cell.alive and cell.request_count > requests_before


def test_namespace(tree: ast.AST, entry_point: str | None, cell: "Cell") -> dict[str, Any]:
    """The names a test finds in place: the entry point, and nothing else of the solution's, or it would shadow what
    the test compares with. Without an entry point, the names that only the solution can have."""
    missing = unbound_names(tree)
    modules = {name for name in missing & sys.stdlib_module_names if not calls(tree, name)}
    found: dict[str, Any] = {name: importlib.import_module(name) for name in modules}
    for name in {entry_point} if entry_point is not None else missing - modules:
        found[name] = SandboxObject(cell, ("get", None, name), has_attributes=name[:1].isupper())
    return found


def unbound_names(tree: ast.AST) -> set[str]:
    """Names a program uses but nowhere binds, Python's own left out."""
    used: set[str] = set()
    bound = set(dir(builtins))
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=other):
                bound.add(other or name.partition(".")[0])
    return used - bound


def calls(tree: ast.AST, name: str) -> bool:
    found = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(function, ast.Name) and function.id == name for function in found)


class SandboxObject:
    """Something in the cell. It equals nothing but itself and has no attributes, unless it is a class (by its name in
    the tests: `Stack`, not `stack`) or was made by one: else an object with a method `startswith` that says yes to
    everything would pass for text."""

    __slots__ = ("__cell", "__found", "__has_attributes")

    def __init__(self, cell: "Cell", found: int | tuple, has_attributes: bool) -> None:
        self.__cell, self.__found, self.__has_attributes = cell, found, has_attributes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sent = [encode(value, self.__reference) for value in (list(args), kwargs)]
        return self.__ask("call", self.__ref(), *sent)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not self.__has_attributes:
            raise AttributeError(f"a solution's result is plain data or a function, it has no `{name}`")
        return self.__ask("get", self.__ref(), name)

    def __ref(self) -> int:
        """Looked up when first used: a test may not come to use it, and the solution may lack it."""
        if isinstance(self.__found, tuple):
            found = self.__ask(*self.__found)
            if not isinstance(found, SandboxObject):
                raise TypeError("not something to call")
            self.__found = found.__found
        assert isinstance(self.__found, int)
        return self.__found

    def __ask(self, *request: Any) -> Any:
        data = self.__cell.ask(*request)
        return decode(data, lambda ref: SandboxObject(self.__cell, ref, self.__has_attributes))

    @staticmethod
    def __reference(value: Any) -> int:
        if not isinstance(value, SandboxObject):
            raise TypeError(f"a test can pass plain data to a solution, not {type(value).__name__}")
        return value.__ref()


@contextlib.contextmanager
def open_cell(source: str, limits: dict[str, Any], jailed: bool, deadline: float) -> Generator["Cell"]:
    """A cell with the solution loaded, if it can be; gone with all its processes and files at the end."""
    with contextlib.ExitStack() as stack:
        work = HERE  # a jail hides whatever folder it is mounted on
        if not jailed:
            work = stack.enter_context(PrivateFolder()) / "work"
            work.mkdir()
        theirs, requests = os.pipe()
        answers, theirs_too = os.pipe()
        keep = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # some Pythons do not start without; the cell clears them
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", str(HERE / "cell.py"), str(theirs), str(theirs_too)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=work,
            env={name: os.environ[name] for name in keep if name in os.environ},
            pass_fds=(theirs, theirs_too),
            start_new_session=True,
        )
        os.close(theirs)
        os.close(theirs_too)
        cell = Cell(requests, answers, deadline)
        try:
            cell.load({"source": source, "limits": limits, "jailed": jailed, "parent": os.getpid()})
            yield cell
        finally:
            os.close(requests)
            os.close(answers)
            stop_process(process)


def stop_process(process: subprocess.Popen) -> None:
    """The cell's outer half ends the solution; if it does not, the group is killed."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may hold even a killed one back
        process.wait(5)


class Cell:
    """The grader's side of the pipes: one request, one answer, all before the deadline."""

    def __init__(self, requests: int, answers: int, deadline: float) -> None:
        self._requests, self._answers, self._deadline = requests, answers, deadline
        self._rest = b""
        self.alive, self.loaded, self.request_count = True, False, 0

    def load(self, settings: dict[str, Any]) -> None:
        try:
            self._send(settings)
            entered = self._receive()  # said before the solution runs, so it cannot talk itself out of the jail
            if entered[0] == "no jail":
                raise NoJail(entered[1])
            self.loaded = self._receive()[0] == "value"
        except CellError:
            return

    def ask(self, *request: Any) -> Any:
        """The solution's answer; what it raises is raised here."""
        self.request_count += 1
        self._send(request)
        match self._receive():
            case ["value", data]:
                return data
            case ["raised", str(name), str(message)]:
                kind = getattr(builtins, name, None)
                known = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, SILENT_ERRORS)
                raise (kind if known else RuntimeError)(message)
        raise self._fail("it sent no answer")

    def _send(self, request: Any) -> None:
        data = json.dumps(request).encode() + b"\n"
        while data:
            self._wait([], [self._requests])
            try:
                data = data[os.write(self._requests, data[: select.PIPE_BUF]) :]
            except OSError as error:
                raise self._fail("it is gone") from error

    def _receive(self) -> list[Any]:
        while b"\n" not in self._rest:
            if len(self._rest) > ANSWER_BYTES:
                raise self._fail("its answer is too large")
            self._wait([self._answers], [])
            more = os.read(self._answers, 1 << 16)
            if not more:
                raise self._fail("it is gone")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._fail("its answer makes no sense") from error
        if not isinstance(answer, list) or not answer:
            raise self._fail("its answer makes no sense")
        return answer

    def _wait(self, readable: list[int], writable: list[int]) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0 or not any(select.select(readable, writable, [], left)):
            raise self._fail("it is late")

    def _fail(self, why: str) -> CellError:
        self.alive = False
        return CellError(f"the solution gives no answer: {why}")
