"""Starting real processes without waiting five seconds for their imports: `Launched` is a `subprocess.Popen` whose
children are forked by `fork_server.py`. Where there is none, and for whatever a fork cannot give, it is a
plain `Popen`.
"""

import atexit
import contextlib
import inspect
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from paceline.util.private_folder import socket_parent

FORK_SERVER = Path(__file__).with_name("fork_server.py")
ADDRESS = "PACELINE_TEST_FORK_SERVER"
START_TRIES = 6000
"""Five minutes: it imports everything first."""
READ_ON_IMPORT = ("PYTHON", "LD_", "HF_", "TRANSFORMERS_", "TORCH", "PYTORCH", "OMP_", "MKL_", "OPENBLAS_", "CUDA_")
"""Variables that count when a module is imported, which in the fork server has happened."""
LATER = ("PYTHONPATH", "PYTHONBREAKPOINT", "TORCHINDUCTOR_")
"""Of these, what is read only when it is used: ray and torch set some themselves."""
PARAMETERS = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]
ASIDE = {"preexec_fn": None, "shell": False, "umask": -1, "process_group": -1, "gid": None, "gids": None, "uid": None}
"""What we do not know how to do for others."""


@cache
def fork_server() -> tuple[str, dict[str, str]]:
    """The address of the fork server, and what it imported under. Test processes that run side by side share one."""
    imported = _imports(os.environ)
    address = os.environ.get(ADDRESS) or start_fork_server()
    for _ in range(START_TRIES):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line, contextlib.suppress(OSError):
            line.connect(address)
            return address, imported
        time.sleep(0.05)
    raise RuntimeError("the fork server did not start")


def start_fork_server() -> str:
    """Start a fork server that ends when this process does; its address, at which it soon listens."""
    address = f"{tempfile.mkdtemp(prefix='forks-', dir=socket_parent(len('/forks-12345678/door')))}/door"
    theirs, ours = os.pipe()
    process = subprocess.Popen(
        [sys.executable, str(FORK_SERVER), address, str(theirs)],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs],
        cwd=Path(address).parent,  # not the folder of whichever test needs it first
    )
    os.close(theirs)

    def end() -> None:
        os.close(ours)
        process.wait(30)

    atexit.register(end)
    return address


def own(command: list[str]) -> list[str]:
    """A command without `-P`, which keeps the current folder off the path, and `-u`, which means pipes to text."""
    return command[1:] if command[:1] in (["-P"], ["-u"]) else command


class Launched(subprocess.Popen):
    """A forked process: `python -m module`, `python -c code` or `python script.py`, with this Python."""

    _line: socket.socket | None = None
    others_alike = True
    """Whether the paceline processes that it starts are forked too."""

    @staticmethod
    def knows(command: list[str]) -> bool:
        return own(command)[:1] in (["-m"], ["-c"]) or (bool(command) and command[0].endswith(".py"))

    def _execute_child(self, *given) -> None:
        asked = dict(zip(PARAMETERS, given, strict=True))
        if not self._forkable(asked):
            return super()._execute_child(*given)
        own = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        passed = sorted(asked["pass_fds"])
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        address, _ = fork_server()
        wish = {
            "command": [os.fspath(part) for part in asked["args"][1:]],
            "folder": str(Path(asked["cwd"] or ".").absolute()),
            "environment": environment | {ADDRESS: address},
            "session": asked["start_new_session"],
            "others_alike": self.others_alike,
            "places": [0, 1, 2, *passed],
        }
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(address)
        descriptors = [at if descriptor == -1 else descriptor for at, descriptor in enumerate(own)]
        socket.send_fds(self._line, [json.dumps(wish).encode()], [*descriptors, *passed])
        self.pid = int(self._line.recv(64))
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[pipe] for pipe in pipes))

    def _forkable(self, asked: dict) -> bool:
        command = asked["args"]
        if sys.platform != "linux" or not isinstance(command, list) or command[0] != sys.executable:
            return False
        if asked["executable"] not in (None, sys.executable):
            return False
        if any(asked.get(name, usual) != usual for name, usual in ASIDE.items()):
            return False
        if not self.knows(command[1:]):
            return False
        return _imports(os.environ if asked["env"] is None else asked["env"]) == fork_server()[1]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._line is None:
            return super()._try_wait(wait_flags)
        if wait_flags & os.WNOHANG and not select.select([self._line], [], [], 0)[0]:
            return 0, 0
        said = self._line.recv(64)
        self._line.close()
        assert said, "the fork server died"
        return self.pid, int(said)

    def _internal_poll(self, _deadstate=None, **more) -> int | None:
        if self._line is None:
            return super()._internal_poll(_deadstate, **more)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid == self.pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


class LaunchedPaceline(Launched):
    """In the place of `subprocess.Popen`: only our own commands are forked, everything else starts as ever."""

    @staticmethod
    def knows(command: list[str]) -> bool:
        return own(command)[:1] == ["-m"] and own(command)[1].split(".")[0] == "paceline"


class LaunchedWorker(Launched):
    """In the place of `subprocess.Popen` where pytest-xdist starts its workers: each would import for 20 seconds."""

    others_alike = False

    @staticmethod
    def knows(command: list[str]) -> bool:
        return own(command)[:1] == ["-c"]


def _imports(environment) -> dict[str, str]:
    names = [name for name in environment if name.startswith(READ_ON_IMPORT) and not name.startswith(LATER)]
    return {name: environment[name] for name in names}


def run(command: list[str], timeout: float = 280, **more) -> subprocess.CompletedProcess:
    """`subprocess.run` with a launched process, whose words are kept."""
    with Launched(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)
