"""Passes a child process its settings, as one line of JSON on its standard input, which then stays open.

The open pipe is its lifeline: when the parent ends, for whatever reason, the pipe closes and the child exits.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Literal

import msgspec

from paceline.config import RunConfig
from paceline.observe.monitor import RunOutcome

FATAL = 2
"""Exit code of a child for which starting again would not help."""


class RunEndReport(msgspec.Struct):
    """How a run ended."""

    status: Literal["finished", "interrupted", "failed"]
    step: int
    message: str
    checkpoint: str | None
    export: str | None
    frames: str = ""
    trace: str = ""

    @classmethod
    def of(cls, outcome: RunOutcome) -> "RunEndReport":
        files = [str(file) if file else None for file in (outcome.checkpoint, outcome.export)]
        return cls(outcome.status, outcome.step, outcome.message, *files, outcome.frames, outcome.trace)

    def outcome(self) -> RunOutcome:
        files = [Path(file) if file else None for file in (self.checkpoint, self.export)]
        return RunOutcome(self.status, self.step, self.message, *files, self.frames, self.trace)


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


def read_brief() -> LaunchSpec:
    """Read the launch spec, and from now on exit when the parent does."""
    brief = msgspec.json.decode(sys.stdin.buffer.readline(), type=LaunchSpec)
    threading.Thread(target=_follow, name="lifeline", daemon=True).start()
    return brief


def _follow() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(125)  # the parent is gone, and nothing needs to be saved here: the run resumes from its checkpoint
