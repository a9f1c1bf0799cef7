"""Runs a solution in a process of its own, in a jail, and answers the grader's calls with plain data.

Run as a file by `grader.py`, without site-packages and with an empty environment: it imports nothing of Paceline. Two
pipes are all it shares with others. It forks once: the child runs the solution, and the parent, which the solution
cannot reach, waits to kill it.
"""

# pathlib takes a while to import, and this is on the way to every check.
# ruff: noqa: PTH101, PTH102, PTH103, PTH109, PTH112, PTH114, PTH120, PTH123, PTH211

import json
import os
import resource
import shutil
import signal
import sys
import types
from collections import deque
from collections.abc import Callable, ItemsView, KeysView, ValuesView
from typing import Any

MAX_MESSAGE_CHARS = 500


def main() -> None:
    requests, answers = int(sys.argv[1]), int(sys.argv[2])
    lines = os.fdopen(requests, "r", encoding="utf-8")
    settings = json.loads(lines.readline())
    work = os.getcwd()
    try:
        if settings["jailed"]:
            enter_namespaces(work, 4 * settings["limits"]["file_mb"])
    except OSError as error:
        return send(answers, ["no jail", str(error)])
    send(answers, ["ready"])
    child = os.fork()
    if child:
        os.close(requests)
        os.close(answers)
        watch(child, settings["parent"], None if settings["jailed"] else work)
    os.environ.clear()
    if settings["jailed"]:
        drop_privileges()
        die_with_parent(signal.SIGKILL)
    set_limits(**settings["limits"])
    if not settings["jailed"]:
        os.environ["TMPDIR"] = work
        install_guard(work)
    serve(Solution(settings["source"]), lines, answers)


def watch(child: int, parent: int, work: str | None) -> None:
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


# --- the jail: kernel namespaces. From here on, all acts on the calling process and cannot be taken back.

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MS_LOCKED = 2 | 4 | 8 | 1024 | 2048
"""nosuid, nodev, noexec, noatime, nodiratime: an unprivileged process may not remove these. `statvfs` has the same."""
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPABILITY_VERSION_3 = 0x20080522
NOBODY = 65534
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
HERE = os.path.dirname(os.path.realpath(__file__))
STDLIB = os.path.dirname(os.path.realpath(os.__file__))
"""Python's own library."""
PACKAGES = ("site-packages", "dist-packages")


def enter_namespaces(root: str, megabytes: int) -> None:
    """Enter new namespaces, with an empty file system over the folder `root` that holds Python's library and
    `/work`. The network is gone at once, other processes for the next forked child. OSError where it is forbidden."""
    if sys.platform != "linux":
        raise OSError("only Linux has namespaces")
    _unshare()
    sys.path[:] = map(os.path.realpath, sys.path)  # links do not come along
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={megabytes}m,mode=755")
    for folder in _library():
        target = root + folder
        os.makedirs(target)
        _mount(folder, target, None, MS_BIND | MS_REC)
        locked = os.statvfs(target).f_flag & MS_LOCKED
        _mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | locked)
    if not os.path.isdir(root + STDLIB):
        raise OSError(f"{STDLIB} is out of reach")
    for folder in LIBRARIES:
        if os.path.islink(folder):
            os.symlink(os.path.realpath(folder), root + folder)
    # No part of the standard library; Paceline's own package has data with answers.
    for hidden in (*(f"{STDLIB}/{name}" for name in PACKAGES), os.path.dirname(os.path.dirname(HERE))):
        if os.path.isdir(root + hidden):
            _mount("tmpfs", root + hidden, "tmpfs", MS_RDONLY)
    os.mkdir(f"{root}/work")
    os.chmod(f"{root}/work", 0o777)
    os.chroot(root)
    os.chdir("/work")


def _unshare() -> None:
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        try:
            return _call("unshare", NAMESPACES)
        except OSError:
            pass  # root of a container, with no more rights than any user
    _call("unshare", NAMESPACES | CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{NOBODY} {uid} 1")
    _write("/proc/self/gid_map", f"{NOBODY} {gid} 1")


def drop_privileges() -> None:
    """Give up every privilege and take a user id of its own, which keeps its process count apart from other cells'."""
    if os.geteuid() == 0:
        os.setgroups([])
        try:
            stranger = (1 << 30) + int.from_bytes(os.urandom(3))
            os.setresgid(stranger, stranger, stranger)
            os.setresuid(stranger, stranger, stranger)
        except OSError:  # a container that knows only the first 65536
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    import ctypes  # see `_call`

    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def die_with_parent(by: signal.Signals) -> None:
    """Linux only; elsewhere limits on the processor's time end what is left behind."""
    if sys.platform == "linux":
        _call("prctl", PR_SET_PDEATHSIG, int(by), 0, 0, 0)


def _library() -> list[str]:
    """Folders without which modules of the standard library cannot be imported. No programs: nothing to run."""
    folders = {os.path.realpath(folder) for folder in (*LIBRARIES, f"{sys.base_prefix}/lib", STDLIB)}
    folders = {folder for folder in folders if os.path.isdir(folder)}
    return sorted(f for f in folders if not any(f.startswith(other + "/") for other in folders))


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    import ctypes  # see `_call`

    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _call(function: str, *args: Any) -> None:
    import ctypes  # a cell under the guard must never have it loaded

    if getattr(ctypes.CDLL(None, use_errno=True), function)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")


# --- limits


def set_limits(seconds: float, memory_mb: int, file_mb: int, processes: int) -> None:
    """Of the processor, of memory, of a file's size and of processes; the kernel ends or refuses what goes beyond."""
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_FSIZE: file_mb << 20,
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(kind, (most, most))
        except (OSError, ValueError):
            if sys.platform == "linux":
                raise  # macOS has no limit on address space


# --- the guard, where the kernel allows no namespaces

FORBIDDEN_EVENTS = (
    *("socket.", "subprocess.", "ctypes.", "gc.", "pty.", "code.", "signal.", "sqlite3."),
    *("fcntl.", "sys.settrace", "sys.setprofile", "sys._current", "sys.addaudithook", "cpython._PySys_ClearAuditHooks"),
    *("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "os.link", "os.symlink", "resource."),
)
FORBIDDEN_MODULES = frozenset({"ctypes", "_ctypes", "_posixsubprocess", "readline", "_testcapi", "_testinternalcapi"})
ZONEINFO = "/usr/share/zoneinfo"


def install_guard(work: str) -> None:
    """End the process when it does what leads out of it and out of the folder `work`.

    An audit hook cannot be removed, and all this one uses is its own, so patching `os` or `builtins` does not reach it.
    It exits instead of raising, and handles exact types only, because with one of its frames in hand, from a traceback
    or a method of a subclass, a program could rewrite its variables.
    """
    sys.addaudithook(_hook(os.path.realpath(work), (*filter(None, sys.path), ZONEINFO)))


def _hook(work: str, library: tuple[str, ...]) -> Callable[[str, tuple], None]:
    forbidden, modules, packages, leave = FORBIDDEN_EVENTS, FORBIDDEN_MODULES, PACKAGES, os._exit
    kind, text, raw, number, nothing = type, str, bytes, int, type(None)

    def inside(path: Any, folders: tuple[str, ...]) -> bool:
        if kind(path) is raw:
            path = raw.decode(path, "utf-8", "surrogateescape")
        if kind(path) is number or kind(path) is nothing:
            return True  # a file that is open already, or the current folder
        if kind(path) is not text or ".." in text.split(path, "/"):
            return False
        if not text.startswith(path, "/"):
            return True
        for package in packages:
            if package in path:
                return False
        for folder in folders:  # noqa: SIM110  `any` may be patched
            if path == folder or text.startswith(path, folder + "/"):
                return True
        return False

    def allowed(event: str, args: tuple) -> bool:
        if event == "open":
            path, _, flags = args
            reads = kind(flags) is number and not flags & 3
            return inside(path, (work, *library) if reads else (work,))
        if event == "import":
            return kind(args[0]) is text and args[0] not in modules
        if event == "os.listdir" or event == "os.scandir":
            return inside(args[0], (work, *library))
        if text.startswith(event, forbidden):
            return False
        if text.startswith(event, "os.") and event != "os.putenv" and event != "os.unsetenv":
            for path in args:
                if not inside(path, (work,)):
                    return False
        return True

    def hook(event: str, args: tuple) -> None:
        if not allowed(event, args):
            leave(1)

    return hook


if __name__ == "__main__":
    main()
