"""Temporary folders that the next process removes where their owner was killed, and folders for Unix sockets."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from paceline.errors import PacelineError

PREFIX = "paceline-"
LOCK = "owner.lock"


class PrivateFolder:
    """A folder of mode 700 that goes with its owner: by `close`, at the end of a `with` block, or when the next one is
    made after the owner was killed. The owner holds a lock, which the system releases when a process dies, and which is
    seen from other containers too, where a process id would not be."""

    def __init__(self, parent: str | Path | None = None) -> None:
        """Below `parent`, by a name that is not shown; or in the system's folder for temporary files."""
        sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=f".{PREFIX}" if parent else PREFIX, dir=parent))
        waiting = self.path / f"{LOCK}.part"
        lock = os.open(waiting, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: a folder there is never swept
            fcntl.flock(lock, fcntl.LOCK_EX)
            waiting.rename(self.path / LOCK)  # other processes see it only when it is locked
        self.close = weakref.finalize(self, _remove, self.path, lock, os.getpid())
        """Remove it with all that is in it; done at the end of the process at the latest."""

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.close()


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # and not a child that was forked from it
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def sweep(parent: str | Path | None = None) -> None:
    """Remove what dead owners left below `parent`, or in the system's folder for temporary files."""
    pattern = f".{PREFIX}*" if parent else f"{PREFIX}*"
    for lock in Path(parent or tempfile.gettempdir()).glob(f"{pattern}/{LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or swept by another process just now
            found = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(found)


LONGEST_PATH = 103
"""Of a socket, in bytes (107 on Linux, 103 on macOS); `TMPDIR` may be longer than that by itself."""
OTHER_FOLDERS = ("/tmp", "/var/tmp")
"""Tried when the path of `TMPDIR` is too long."""
RAY_BYTES = len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""What Ray appends to its temporary folder."""


def socket_parent(more_bytes: int) -> str:
    """A writable temporary folder under which a path of `more_bytes` more bytes may be a socket's."""
    folders = (tempfile.gettempdir(), *OTHER_FOLDERS)
    for folder in folders:
        if len(os.fsencode(folder)) + more_bytes <= LONGEST_PATH and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise PacelineError(
        f"no temporary folder has a path short enough for a Unix socket (tried {', '.join(dict.fromkeys(folders))}): "
        f"set TMPDIR to a writable folder of at most {LONGEST_PATH - more_bytes} bytes"
    )


def shorten_ray_sockets() -> None:
    """Let Ray put its sockets where their paths are short enough. `RAY_TMPDIR` wins if it is set."""
    if "RAY_TMPDIR" not in os.environ and (folder := socket_parent(RAY_BYTES)) != tempfile.gettempdir():
        os.environ["RAY_TMPDIR"] = folder
