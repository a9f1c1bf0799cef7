"""Starts the three processes of a run, and restarts any that dies.

Each gets its settings as one line of JSON on its standard input, which then stays open. The open pipe is its lifeline:
when the parent ends, for whatever reason, the pipe closes and the child exits.
"""

import contextlib
import fcntl
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO

import msgspec
from pydantic import TypeAdapter

from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.model import ModelError, resolve
from paceline.observe.monitor import RunDirectory, RunOutcome, RunRecorder
from paceline.observe.monitor.waitgraph import blocking_chain
from paceline.observe.monitor.watchdog import waits_file
from paceline.orchestrator import Checkpoints
from paceline.runtime.session import RunResult, read_metrics, result_of
from paceline.runtime.signals import STOPPED_BY_USER, Status
from paceline.util.child_process import end_child, free_port, start_child
from paceline.util.private_folder import PREFIX, PrivateFolder, socket_parent

MAX_DEATHS = 10
"""Deaths of one process in a row, without a trained step between them, before the run stops."""
LOOK_SECONDS = 0.1
CLOSE_SECONDS = 10.0
STOP_SECONDS = 4.8
"""Time an orchestrator gets to end after a second signal; it ends itself earlier, if it can."""
SOCKET = "trainer.sock"
SOCKET_BYTES = len(f"/.{PREFIX}12345678/{SOCKET}")
ROLES = ("server", "trainer", "orchestrator")
FATAL = 2
"""Exit code of a child for which starting again would not help."""
FINAL_EXIT_CODES = (0, 1, FATAL, 130)
"""Exit codes by which the orchestrator says that the run is over."""
OUTCOME = TypeAdapter(RunOutcome)
"""How a run ended, as JSON."""


class LaunchSpec(msgspec.Struct):
    """Config and addresses of a run's processes. A key is made for each run; it is never on disk or in arguments."""

    config: str
    """The run's, as JSON."""
    folder: str
    """The run directory's `live` folder: weights on their way, logs."""
    port: int
    key: str
    socket: str
    """Port and key of the server, and the trainer's socket."""
    url: str
    trainer: str
    """Where the orchestrator finds server and trainer."""
    overwrite: bool
    screen: bool
    report: int = -1
    """Where the orchestrator writes how the run ended: a pipe, for the disk may be full."""

    @property
    def run(self) -> RunConfig:
        return RunConfig.model_validate_json(self.config)

    @property
    def weights(self) -> Path:
        return Path(self.folder) / "weights"

    def __repr__(self) -> str:
        return f"LaunchSpec({self.url}, {self.trainer})"  # the key stays secret


@dataclass(slots=True)
class ManagedProcess:
    """One of the three processes, across its restarts."""

    role: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int = 0
    """Length of its log when it was last started."""
    starts: int = 1
    deaths: int = 0
    """In a row."""
    step: int = 0
    """The run's, when it last died."""


@dataclass(slots=True)
class Supervisor:
    """The processes of one run."""

    config: RunConfig
    overwrite: bool = False
    screen: TextIO | None = None
    proxied_address: Callable[[str], str] = lambda address: address
    """The address under which the orchestrator finds the server or the trainer that listens on the given one; another
    one where a proxy is between them."""
    directory: RunDirectory = field(init=False)
    children: dict[str, ManagedProcess] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)
    _stop_by: float = math.inf
    """When the orchestrator is killed, after a second signal."""
    _earlier_run_file: tuple[int, int] | None = None
    """Identity of the run file that was in the directory before this run."""
    _outcome_pipe: IO[bytes] = field(init=False)
    """The pipe on which the orchestrator reports how the run ended."""

    def __post_init__(self) -> None:
        self.directory = RunDirectory(Path(self.config.runs) / self.config.name)

    def run(self) -> RunResult:
        """Supervise until the orchestrator reports the end of the run, or a process dies too often."""
        path = self.directory.root
        RunDirectory.claim(path, bool(self.config.resume), self.overwrite).release()  # or say at once why not
        self._earlier_run_file = _file_identity(self.directory.config_file)
        try:
            resolve(self.config.model.name)  # before three processes are started that cannot find it
        except ModelError as error:
            return self._failed(str(error))
        with ExitStack() as stack:
            spec = self._launch_spec(stack)
            if threading.current_thread() is threading.main_thread():
                # Signals are handed on to the orchestrator, which ends the run in good order; the others end with it.
                for number in (signal.SIGINT, signal.SIGTERM):
                    before = signal.signal(number, lambda number, _: self.interrupt(number))
                    stack.callback(signal.signal, number, before)
            stack.callback(self._end_all)
            if self.screen is not None:  # it takes them a while to say something themselves
                print("... starting server, trainer and orchestrator", file=self.screen, flush=True)
            for role in ROLES:
                log = self.directory.live / f"{role}.log"
                log.write_bytes(b"")
                self.children[role] = ManagedProcess(role, self._start(role, spec), log)
            while True:
                if time.monotonic() > self._stop_by:  # native code may keep it from hearing anything
                    self.children["orchestrator"].process.kill()
                for child in self.children.values():
                    if (code := child.process.poll()) is None:
                        continue
                    if child.role == "orchestrator" and (code in FINAL_EXIT_CODES or self.signals):
                        self._end_all()
                        for role in ROLES:  # no process waits any more
                            (self.directory.root / f"waits-{role}.json").unlink(missing_ok=True)
                        return result_of(self.directory, self._report(child))
                    if cause := self._give_up_reason(child, code):
                        return self._failed(cause)
                    if child.role == "orchestrator" and self._begun:
                        spec = self._resume_spec(spec)
                    end_child(child.process, CLOSE_SECONDS, CLOSE_SECONDS)
                    child.log_start = child.log.stat().st_size
                    child.process = self._start(child.role, spec)
                    child.starts += 1
                time.sleep(LOOK_SECONDS)  # unbounded: watching is its job

    # -- lives and deaths ---------------------------------------------------------------------------------------------

    def _start(self, role: str, spec: LaunchSpec) -> subprocess.Popen[bytes]:
        def copy(pipe: IO[bytes], screen: TextIO) -> None:
            for line in pipe:
                with contextlib.suppress(OSError, ValueError):  # a screen that is gone must not hold up the run
                    screen.write(line.decode(errors="replace"))

        spoken = role == "orchestrator"
        reader, writer = os.pipe() if spoken else (-1, -1)
        if spoken:
            spec = msgspec.structs.replace(spec, report=writer)
            self._outcome_pipe = os.fdopen(reader, "rb")
        log = (Path(spec.folder) / f"{role}.log").open("ab")
        out: Any = log
        if spoken:  # to the very screen if it is a file, else by a pipe to it
            try:
                out = subprocess.DEVNULL if self.screen is None else self.screen.fileno()
            except (OSError, ValueError, AttributeError):
                out = subprocess.PIPE
        with log:
            line, module = msgspec.json.encode(spec) + b"\n", "paceline.runtime.processes.child"
            fds = [writer] if spoken else []
            process = start_child(module, role, line=line, stdout=out, stderr=log, pass_fds=fds)
        if spoken:
            os.close(writer)
        if process.stdout is not None:
            threading.Thread(target=copy, args=(process.stdout, self.screen), daemon=True).start()
        return process

    def _give_up_reason(self, child: ManagedProcess, code: int) -> str:
        """Why starting it again would not help; empty if it may."""
        words = self._last_output(child)
        if code == FATAL and child.starts == 1:
            return f"the {child.role} cannot start: {words}"
        step = self._step()
        child.deaths = 1 if step > child.step else child.deaths + 1
        child.step = max(step, child.step)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if child.deaths >= MAX_DEATHS:
            last = f": {words}" if words else ""
            return f"the {child.role} {how}, the {child.deaths}th time without a step in between{last}"
        text = f"the {child.role} {how}; starting it again" + (f" (it said: {words})" if code > 0 else "")
        if self.screen is not None:
            print(f"note: {text}", file=self.screen, flush=True)
        with contextlib.suppress(OSError), (self.directory.live / "supervisor.log").open("a") as log:
            print(time.strftime("%H:%M:%S"), text, file=log)
        return ""

    def _resume_spec(self, spec: LaunchSpec) -> LaunchSpec:
        """For an orchestrator that comes back: it goes on from where its run directory stands."""
        if Checkpoints(self.directory.checkpoints, 1).all():
            resumed = self.config.model_copy(update={"resume": "latest"})
            return msgspec.structs.replace(spec, config=resumed.model_dump_json(), overwrite=False)
        # It began, and died before it had kept anything: it begins again, or resumes again from elsewhere.
        fresh = self.config.model_copy(update={"resume": None}) if self.config.resume == "latest" else self.config
        return msgspec.structs.replace(spec, config=fresh.model_dump_json(), overwrite=not fresh.resume)

    @property
    def _begun(self) -> bool:
        """Whether the run's directory is this run's by now, and not an older one's."""
        return _file_identity(self.directory.config_file) != self._earlier_run_file

    def _failed(self, cause: str) -> RunResult:
        """End all processes and report the cause, which the orchestrator no longer can."""
        self._end_all()
        directory = self.directory
        if not self._begun:  # what lies there is an older run's
            return RunResult(RunOutcome("failed", 0, cause), directory.root, [], [], PacelineError(cause))
        outcome = self._outcome("failed", cause)
        with contextlib.suppress(OSError):
            RunRecorder(directory.root).end(outcome)
        return result_of(directory, outcome)

    def _report(self, child: ManagedProcess) -> RunOutcome:
        """The outcome that the orchestrator reported; one that was told to stop at once reports nothing."""
        os.set_blocking(self._outcome_pipe.fileno(), False)  # a child of its own may still hold the other end
        with self._outcome_pipe as pipe:
            words = pipe.read()
        if words:
            return OUTCOME.validate_json(words)
        if self.signals:
            return self._outcome("interrupted", STOPPED_BY_USER)
        return self._outcome("failed", f"the orchestrator failed: {self._last_output(child)}")

    def _outcome(self, status: Status, message: str) -> RunOutcome:
        saved = next(reversed(Checkpoints(self.directory.checkpoints, 1).all()), None)
        return RunOutcome(status, self._step(), message, saved)

    def _end_all(self) -> None:
        for child in self.children.values():
            if child.process.poll() is None:
                child.process.terminate()
            end_child(child.process, CLOSE_SECONDS, CLOSE_SECONDS)

    # -- surroundings -------------------------------------------------------------------------------------------------

    def _launch_spec(self, stack: ExitStack) -> LaunchSpec:
        """Addresses of the processes: a free port, a socket in a private folder, a folder for weights, a key."""
        live = self.directory.live
        weights = live / "weights"
        live.mkdir(parents=True, exist_ok=True)
        lock = stack.enter_context((live / "supervisor.lock").open("w"))
        try:  # between two lives of the orchestrator the run directory's own lock is free
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            root = self.directory.root
            raise PacelineError(f"{root} is in use by another run: wait for it, or choose another --name") from None
        private = stack.enter_context(PrivateFolder(socket_parent(SOCKET_BYTES)))
        shutil.rmtree(weights, ignore_errors=True)
        weights.mkdir(parents=True)
        stack.callback(shutil.rmtree, weights, ignore_errors=True)
        port, address = free_port(), f"{private}/{SOCKET}"
        return LaunchSpec(
            config=self.config.model_dump_json(),
            folder=str(live.resolve()),
            port=port,
            key=secrets.token_urlsafe(24),
            socket=address,
            url=self.proxied_address(f"http://127.0.0.1:{port}"),
            trainer=self.proxied_address(address),
            overwrite=self.overwrite,
            screen=self.screen is not None,
        )

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Hand a signal on to the orchestrator."""
        self.signals.append(number)
        if len(self.signals) == 2:
            self._stop_by = time.monotonic() + STOP_SECONDS
        if child := self.children.get("orchestrator"):
            child.process.send_signal(number)

    def _step(self) -> int:
        return max((line["step"] for line in read_metrics(self.directory)), default=0)

    def _last_output(self, child: ManagedProcess) -> str:
        """A child's last message since its start: a sentence for the user, or its last line and where the rest is."""
        if not child.log.exists():
            return self._last_wait(child) or "nothing"
        with child.log.open("rb") as log:
            log.seek(child.log_start)
            lines = log.read().decode(errors="replace").splitlines()
        spoken = [line.removeprefix("paceline: ") for line in lines if line.startswith("paceline: ")]
        words = next((line for line in reversed(spoken) if not line.startswith(("serving ", "stopped"))), "")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if words or last:
            return words or f"{last} (all of it is in {child.log})"
        if trouble := _write_error(child.log):
            return f"nothing, and {child.log.parent} cannot be written ({trouble}): make room, then add --resume latest"
        return self._last_wait(child) or f"nothing (all of it is in {child.log})"

    def _last_wait(self, child: ManagedProcess) -> str:
        """What a child that died silently was doing, by the watchdog's last snapshot. Only the orchestrator runs
        environments, so that an episode in it points to user code."""
        part = "" if child.role == "orchestrator" else child.role
        try:
            state = json.loads(waits_file(self.directory.root, part).read_text())
            doing = blocking_chain(state["waits"]) if state["pid"] == child.process.pid else ""
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        hint = "; user code that ends the process, by os._exit or a crash in native code, ends the run"
        return f"nothing. It was last seen at: {doing}{hint if child.role == 'orchestrator' else ''}" if doing else ""


def _file_identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _write_error(log: Path) -> str:
    """Why no more can be written beside a log, such as a full disk; empty where it can."""
    try:
        with tempfile.TemporaryFile(dir=log.parent) as probe:
            probe.write(b" " * 4096)
            probe.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""
