"""The run directory: its paths, and the lock that gives one process the right to write there."""

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.errors import PacelineError
from paceline.monitor.files import replace_file


class RunDirectoryError(PacelineError):
    """The run directory cannot be used. The message is one sentence for the user."""


class RunDirectory:
    """The places inside one run's directory. Reading needs no more than this; writing starts with `claim`."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._lock: int | None = None
        self._overwrite = False
        self.begun = False

    @property
    def config_file(self) -> Path:
        return self.root / "config.toml"

    @property
    def metrics_file(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def rollouts_file(self) -> Path:
        return self.root / "rollouts.jsonl"

    @property
    def tickets_file(self) -> Path:
        return self.root / "tickets.jsonl"

    @property
    def events_file(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def batches(self) -> Path:
        return self.root / "batches"

    @property
    def export(self) -> Path:
        return self.root / "export"

    @property
    def plot(self) -> Path:
        return self.root / "rewards.png"

    @property
    def live(self) -> Path:
        """Files that the processes of a running run share: weights in transfer, and each one's log."""
        return self.root / ".live"

    @property
    def lock_file(self) -> Path:
        return self.root / "run.lock"

    @classmethod
    def claim(cls, path: Path, resume: bool = False, overwrite: bool = False) -> Self:
        """Make the directory this process's own, until `release` or the process's end.

        The lock is the kernel's, so it goes with a killed process; its file stays and marks the folder.
        """
        if resume and overwrite:
            raise RunDirectoryError("--resume and --overwrite exclude each other: leave one of them out")
        directory = cls(path)
        try:
            directory._claim(resume, overwrite)
        except OSError as error:
            directory.release()
            reason = error.strerror or str(error)
            raise RunDirectoryError(
                f"cannot use {path} as run directory: {reason}; choose a folder with --runs"
            ) from error
        except RunDirectoryError:
            directory.release()
            raise
        return directory

    def begin(self, config: str) -> None:
        """The run really starts: only now does what it replaces go."""
        if self._overwrite:
            self._clear()
        self.checkpoints.mkdir(exist_ok=True)
        replace_file(self.config_file, [config.encode()])
        self.begun = True

    def release(self) -> None:
        """Let others have the directory; safe to call twice."""
        if self._lock is not None:
            # Unlock by name: a forked child that still holds the descriptor would keep the lock alive.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _claim(self, resume: bool, overwrite: bool) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self._refuse_foreign()
        self._take_lock()
        self._overwrite = overwrite
        if not (resume or overwrite) and (self.config_file.exists() or self.metrics_file.exists()):
            raise RunDirectoryError(
                f"{self.root} already holds a run: add --resume latest to go on, "
                "--name NAME to start another, or --overwrite to replace it"
            )

    def _refuse_foreign(self) -> None:
        """A folder with other people's files is no place to write, and even less one to clear."""
        ours = self.config_file.exists() or self.lock_file.exists()
        if not ours and any(not entry.name.startswith(".") for entry in self.root.iterdir()):
            raise RunDirectoryError(f"{self.root} holds files that are not a run's: choose another --name")

    def _take_lock(self) -> None:
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            who = f"process {holder}" if holder else "another process"
            raise RunDirectoryError(f"{self.root} is in use by {who}: wait for it, or choose another --name") from None
        except OSError:
            os.close(descriptor)
            raise
        self._lock = descriptor
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())

    def _clear(self) -> None:
        for entry in self.root.iterdir():
            if entry in (self.lock_file, self.live):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)  # the watchdog's draft, which has its final name by now
