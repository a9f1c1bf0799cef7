"""Defines the base class of a run's Ray actors."""

import os
import socket
import sys
from pathlib import Path

import ray

from paceline.config import RunConfig

CONTROL = "control"
"""The group of calls that are answered however many requests there are; it has an event loop of its own."""


class RayActor:
    """A part of a run in a process of Ray's. What it prints goes into the run directory, which every machine of the
    cluster must see under the same path, as checkpoints do."""

    def __init__(self, config: str, name: str, live: str) -> None:
        self.config = RunConfig.model_validate_json(config)
        self.name = name
        if Path(live).is_dir():
            _write_to(Path(live) / f"{name}.log")

    @ray.method(concurrency_group=CONTROL)
    async def whereabouts(self) -> tuple[str, int]:
        """This machine and process."""
        return socket.gethostname(), os.getpid()


def _write_to(log: Path) -> None:
    """Standard output and error go to the end of this file from now on, also those of libraries written in C."""
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
