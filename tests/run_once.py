"""Work that several test processes ask for and one of them does."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, work: Callable[[Path], object]) -> Path:
    """A folder that `work` has filled. The tests of a module may run in several processes, whose fixtures are each
    their own; the first process works, the others wait and find it done."""
    base = factory.getbasetemp()
    base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder = base / f"once-{name}"
    with (base / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            work(folder)
            (folder / "done").touch()
    return folder
