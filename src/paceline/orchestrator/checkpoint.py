"""Checkpoints: one atomic folder each, the newest named by `latest`."""

import contextlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from paceline.orchestrator.breaker import RunStopped
from paceline.waits import waiting

LATEST = "latest"
STATE = "state.json"


class CheckpointError(RunStopped):
    """A checkpoint that cannot be written or read, as a sentence for the user."""


class Checkpoints:
    """The folder `checkpoints/` of a run. What is there is whole: a checkpoint appears by one rename or not at all."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    async def save(self, step: int, state: str, trainer: Callable[[Path], Awaitable[None]]) -> Path:
        """Write a checkpoint, point `latest` at it, delete the oldest ones.

        `state` is JSON text and no object, so that nothing that happens while the trainer saves can leak into it.
        """
        final = self._folder / f"step-{step:06d}"
        draft = self._folder / f".{final.name}.tmp"
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            with waiting("writing a checkpoint"):
                await trainer(draft)
            (draft / STATE).write_text(state, encoding="utf-8")
            _flush(draft)
            self._swap_in(draft, final)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {final} could not be written ({error.strerror or error}): make room, then go on with "
                f"--resume latest; {self._what_is_left()}"
            ) from error
        self._prune()
        return final

    def find(self, resume: str) -> tuple[Path, dict]:
        """The checkpoint behind `latest` or a path, with the orchestrator's state."""
        path = self._newest() if resume == LATEST else Path(resume)
        if not (path / STATE).is_file():
            raise CheckpointError(f"resume = `{resume}`: no checkpoint at {path}; {self._what_is_left()}")
        path = path.resolve()
        return path, json.loads((path / STATE).read_text(encoding="utf-8"))

    def all(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return sorted(path for path in self._folder.glob("step-*") if (path / STATE).is_file())

    def forget_after(self, step: int) -> None:
        """Remove what a roll-back to `step` undoes, and whatever a killed run left half written."""
        survivor = self._folder / f"step-{step:06d}"
        if (survivor / STATE).is_file():
            self._point_at(survivor)  # first of all: `latest` never names what is half gone
        for path in [p for p in self.all() if p.name > survivor.name]:
            self._remove(path)
        for path in self._folder.glob(".*.tmp"):
            path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)

    def _newest(self) -> Path:
        """What `latest` names; should a crash have left it dangling, the newest whole checkpoint."""
        link = self._folder / LATEST
        return link if (link / STATE).is_file() else next(reversed(self.all()), link)

    def _swap_in(self, draft: Path, final: Path) -> None:
        if final.exists():
            replaced = self._folder / f".{final.name}.replaced.tmp"
            shutil.rmtree(replaced, ignore_errors=True)
            final.replace(replaced)
            draft.replace(final)
            shutil.rmtree(replaced)
        else:
            draft.replace(final)
        _sync(self._folder)
        self._point_at(final)

    def _point_at(self, final: Path) -> None:
        link = self._folder / f".{LATEST}.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.replace(self._folder / LATEST)
        _sync(self._folder)

    def _prune(self) -> None:
        for old in self.all()[: -self._keep]:
            self._remove(old)

    def _remove(self, path: Path) -> None:
        """By a rename first: a checkpoint whose removal is cut short must not look like a whole one."""
        gone = path.with_name(f".{path.name}.gone.tmp")
        shutil.rmtree(gone, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.replace(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _what_is_left(self) -> str:
        whole = self.all()
        if not whole:
            return "there is no earlier checkpoint"
        return f"the newest whole checkpoint is {whole[-1]}"


def _flush(folder: Path) -> None:
    """Everything on disk before the rename that makes it count."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
