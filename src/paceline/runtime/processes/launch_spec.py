"""Passes a child process its settings, as one line of JSON on its standard input, which then stays open.

The open pipe is its lifeline: when the parent ends, for whatever reason, the pipe closes and the child exits.
"""

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import IO, TextIO

import msgspec
from pydantic import TypeAdapter

from paceline.config import RunConfig
from paceline.observe.monitor import RunOutcome
from paceline.util.process_exit import exit_with_stdin

FATAL = 2
"""Exit code of a child for which starting again would not help."""


OUTCOME = TypeAdapter(RunOutcome)
"""How a run ended, as JSON."""


class LaunchSpec(msgspec.Struct):
    """Config and addresses of a run's processes. A key is made for each run; it is never on disk or in arguments."""

    config: str
    """The run's, as JSON."""
    folder: str
    """The run directory's `live` folder: weights on their way, logs."""
    port: int
    """Where the server listens."""
    key: str
    socket: str
    """Where the trainer listens."""
    url: str
    """Where the orchestrator finds the server."""
    trainer: str
    """Where the orchestrator finds the trainer."""
    overwrite: bool = False
    screen: bool = True
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

    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


def read_launch_spec() -> LaunchSpec:
    """Read the launch spec, and from now on exit when the parent does."""
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=LaunchSpec)
    exit_with_stdin()
    return spec


def start_child(
    module: str,
    *arguments: str,
    line: bytes,
    stdout: TextIO | IO[bytes] | int,
    stderr: IO[bytes],
    env: dict[str, str] | None = None,
    pass_fds: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Run a module in a session of its own: a Ctrl-C is for this process to hear. `line` comes first on its standard
    input, which stays open."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=env,
        pass_fds=pass_fds,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        pass  # dead already: the next poll will see it
    except BaseException:
        process.kill()
        raise
    return process
