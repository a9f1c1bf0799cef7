"""A folder for large things on their way, which a killed process does not leave behind for ever."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

PREFIX = "paceline-weights-"
LOCK = "owner.lock"


class PrivateFolder:
    """Readable by nobody else (mode 700), and gone with its owner: by `close`, or by whoever makes the next one after
    the owner was killed. The owner holds a lock that the system takes back from the dead, and that is seen from other
    containers too, where a process id would not be."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        waiting = self.path / f"{LOCK}.part"
        lock = os.open(waiting, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.rename(self.path / LOCK)  # nobody sees it before it is locked
        self.close = weakref.finalize(self, _remove, self.path, lock, os.getpid())
        """Remove it with all that is in it; done at the end of the process at the latest."""


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # and not a child that was forked from it
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def sweep() -> None:
    """Remove what dead owners left in the folder for temporary files."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or somebody swept it just now
            found = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(found)
