"""A process that has imported everything, and forks the processes that tests start, and those they run in:
`child_processes.py` asks for them.

A fresh `python -m paceline` spends five seconds of a core on imports before its first line of work. The fork server
spends them once; then it waits, without threads of its own, random draws or an event loop, and each child begins where
its imports would have ended: with the descriptors, folder, environment and arguments it was given, signals as Python
sets them, and the end of any interpreter. Only two things are not as in a fresh process: more modules are imported than
it asked for, and strings have the hashes they have in the fork server.

    python tests/fork_server.py ADDRESS LIFELINE
"""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path

MODULES = (
    "torch",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "peft",
    "matplotlib.pyplot",
    "uvloop",
    "uvicorn.protocols.http.httptools_impl",
    "fastapi.testclient",
    "openai",
    "textual.app",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "paceline.commands",
    "paceline.runtime.serving",
    "paceline.runtime.session",
    "paceline.observe.web.app",
    "paceline.commands.play",
    "paceline.commands.rollouts",
    "paceline.runtime.processes.child",
)
LONGEST = 1 << 18


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """What to run, and with what."""

    command: list[str]
    """After the interpreter: `-m module ...`, `-c code ...` or `script.py ...`, or `-P` or `-u` and one of these."""
    folder: str
    environment: dict[str, str]
    session: bool
    others_alike: bool
    places: list[int]
    """The descriptors it has, in the order in which they come over the socket."""


class ForkServer:
    """Forks and reaps. A connection lives as long as its child: the pid goes over it, and at the end the status."""

    def __init__(self, door: socket.socket, lifeline: int) -> None:
        self._door, self._lifeline = door, lifeline
        self._lines: dict[int, socket.socket] = {}
        self._children: dict[int, int] = {}
        self._poll = select.poll()
        for descriptor in (door.fileno(), lifeline):
            self._poll.register(descriptor, select.POLLIN)

    def serve(self) -> ForkRequest | None:
        """Until the tests are gone; returns in each child with what it is to be."""
        while True:
            for ready, _ in self._poll.poll():
                if ready == self._lifeline:
                    for pid in self._children.values():
                        os.kill(pid, signal.SIGKILL)
                    return None
                if ready != self._door.fileno():
                    self._reap(ready)
                elif request := self._fork():
                    return request

    def _fork(self) -> ForkRequest | None:
        line, _ = self._door.accept()
        said, given = b"", []
        with contextlib.suppress(OSError):
            said, given, _, _ = socket.recv_fds(line, LONGEST, 64)
        if not said:  # left again
            line.close()
            return None
        request = ForkRequest(**json.loads(said))
        # A signal for the child waits until the child is itself.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        pid = os.fork()
        if pid == 0:
            for mine in (self._door, line, *self._lines.values()):
                mine.detach()  # or its number would be closed again when another socket has it
            _place(given, request.places)
            return request
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
        for descriptor in given:
            os.close(descriptor)
        watch = os.pidfd_open(pid)
        self._lines[watch], self._children[watch] = line, pid
        self._poll.register(watch, select.POLLIN)
        with contextlib.suppress(OSError):  # the one that asked has died since
            line.send(str(pid).encode())
        return None

    def _reap(self, watch: int) -> None:
        _, status = os.waitpid(self._children.pop(watch), 0)
        self._poll.unregister(watch)
        os.close(watch)
        with self._lines.pop(watch) as line, contextlib.suppress(OSError):  # the one that asked has left
            line.send(str(status).encode())


def _place(given: list[int], places: list[int]) -> None:
    """Give each descriptor its number, and close all others."""
    beyond = max(*places, *given) + 1
    parked = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, beyond) for descriptor in given]
    os.closerange(3, beyond)
    for descriptor, place in zip(parked, places, strict=True):
        os.dup2(descriptor, place)
    os.closerange(beyond, os.sysconf("SC_OPEN_MAX"))


def become(request: ForkRequest) -> None:
    """Be the process that was asked for; an exception ends the interpreter, as everywhere."""
    import numpy
    import torch

    if request.session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    random.seed()
    numpy.random.seed()
    torch.default_generator.seed()
    if request.others_alike:
        _start_others_alike()
    safe, command = request.command[0] == "-P", request.command[request.command[0] in ("-P", "-u") :]
    kind, *rest = command
    paths = [path for path in request.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = str(Path(kind).parent.resolve()) if kind not in ("-m", "-c") else request.folder
    sys.path[:1] = paths if safe else [first, *paths]
    if kind == "-m":
        name, *sys.argv[1:] = rest
        sys.modules.pop(name, None)  # it will be `__main__`
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code, *arguments = rest
        sys.argv = ["-c", *arguments]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        sys.argv = command
        runpy.run_path(kind, run_name="__main__")


def _start_others_alike() -> None:
    """What the child starts as `python -m paceline...` is forked here too."""
    import subprocess

    import child_processes

    subprocess.Popen = child_processes.LaunchedPaceline


def _import_all() -> None:
    """Everything but triton where there is no GPU: torch imports it if it is installed, and when a child ends, triton's
    native part would report on stderr what `gc.freeze` keeps alive."""
    import torch

    hidden = not torch.cuda.is_available() and "triton" not in sys.modules
    if hidden:
        sys.modules["triton"] = None  # ty: ignore[invalid-assignment]
    for name in MODULES:
        importlib.import_module(name)
    if hidden:
        del sys.modules["triton"]


def main(address: str, lifeline: int) -> ForkRequest | None:
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends when the tests do, and ends their processes then
        signal.signal(number, signal.SIG_IGN)
    _import_all()
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(address)
    door.listen(64)
    return ForkServer(door, lifeline).serve()


if __name__ == "__main__":
    request = main(sys.argv[1], int(sys.argv[2]))
    if request is None:
        shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
        os._exit(0)
    become(request)
