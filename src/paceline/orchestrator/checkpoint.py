"""Writes and finds checkpoints: one atomic folder each, the newest named by `latest`, each file with a digest.

A folder holds the trainer's files, the orchestrator's `state.json`, and the finished groups that the run still needs
(`saved_groups.py`).
"""

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from paceline.errors import RunStopped
from paceline.util.deadlines import named_wait
from paceline.weights.manifest import MANIFEST, find_problems, has_manifest, join_first, write_manifest

LATEST = "latest"
PROMOTED = "promoted"
"""Names the checkpoint of the last version that passed [promotion]."""
STATE = "state.json"


class CheckpointError(RunStopped):
    """A checkpoint that cannot be written or read, as a sentence for the user."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose files are not as they were written. `newest_intact` is the newest one whose are, if any."""

    def __init__(self, message: str, newest_intact: Path | None) -> None:
        super().__init__(message)
        self.newest_intact = newest_intact


class Checkpoints:
    """The folder `checkpoints/` of a run. What is there is whole: a checkpoint appears by one rename or not at all."""

    def __init__(self, folder: Path, keep: int, resume_hint: str = "--resume {}") -> None:
        self._folder, self._keep = folder, keep
        self._resume_hint = resume_hint
        """How the user writes that a run goes on from a checkpoint."""

    async def save(self, step: int, state: str, trainer: Callable[[Path], Awaitable[None]]) -> Path:
        """Write a checkpoint, point `latest` at it, delete the oldest ones.

        `state` is JSON text and no object, so that nothing that happens while the trainer saves can leak into it.
        """
        final = self._folder / f"step-{step:06d}"
        draft = self._folder / f".{final.name}.tmp"
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            with named_wait("writing a checkpoint"):
                await trainer(draft)
                (draft / STATE).write_text(state, encoding="utf-8")
                # Hashed while the disk is busy; both leave the event loop to the episodes. Everything is on disk
                # before the rename that makes it count.
                written = list(draft.rglob("*"))  # before the manifest's own draft is among them
                await asyncio.gather(asyncio.to_thread(write_manifest, draft), asyncio.to_thread(_sync, *written))
                await asyncio.to_thread(_sync, draft / MANIFEST, draft)
            self._swap_in(draft, final)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            again = f"go on with {self._resume_hint.format(LATEST)}" if self.all() else "start the run again"
            raise CheckpointError(
                f"checkpoint {final} could not be written ({error.strerror or error}): make room, then {again}; "
                f"{self.list_resumable()}"
            ) from error
        for old in self.all()[: -self._keep]:
            if old.name != self.promoted_name:
                self._remove(old)
        return final

    def promote(self, step: int) -> bool:
        """Point `promoted` at the checkpoint of a step, by one rename; False if there is no such checkpoint."""
        final = self._folder / f"step-{step:06d}"
        if final.is_dir():
            self._point_at(final, PROMOTED)
        return final.is_dir()

    @property
    def promoted_name(self) -> str:
        """The name of the promoted checkpoint; empty if there is none."""
        link = self._folder / PROMOTED
        return link.readlink().name if link.is_symlink() and link.is_dir() else ""

    @property
    def promoted(self) -> Path | None:
        """The promoted checkpoint, which stays however old it is."""
        return self._folder / name if (name := self.promoted_name) else None

    def find(self, resume: str) -> tuple[Path, dict]:
        """The checkpoint behind `latest`, the name of one of this run (`step-000020`) or a path, and the orchestrator's
        state in it."""
        path, own = Path(resume), self._folder / Path(resume).name
        if resume == LATEST:  # should a crash have left the link dangling, the newest checkpoint
            path = own if own.is_dir() else next(reversed(self.all()), own)
        elif not path.exists() and own.is_dir():
            path = own
        if path.is_dir() and (found := find_problems(path, STATE)):
            raise self._damage_error(path.resolve(), found)
        if not (path / STATE).is_file():
            lost = f"{path} has no {STATE}" if path.is_dir() else f"no checkpoint at {path}"
            raise CheckpointError(f"resume = `{resume}`: {lost}; {self.list_resumable()}")
        path = path.resolve()
        if (state := _read_state(path)) is None:
            raise self._damage_error(path, [f"{STATE} cannot be read"])
        return path, state

    async def check(self, path: Path) -> str:
        """Compare every file of a checkpoint with its digest and raise a sentence where one differs. Answers with a
        note where the checkpoint has no digests."""
        with named_wait("checking the files of a checkpoint"):
            if found := await asyncio.to_thread(find_problems, path):
                raise await asyncio.to_thread(self._damage_error, path, found)
        if has_manifest(path):
            return ""
        return f"{path} has no {MANIFEST}, as those of older versions: its files were taken up unchecked"

    def _damage_error(self, path: Path, found: list[str]) -> DamagedCheckpoint:
        others = (other for other in reversed(self.all()) if other.resolve() != path)
        whole = next((one for one in others if _read_state(one) is not None and not find_problems(one)), None)
        then = "there is no other whole checkpoint:"
        if whole is not None:
            then = f"write {self._resume_hint.format(whole.name)} to go on from the newest whole one, or"
        then += " bring the files back from a copy"
        return DamagedCheckpoint(f"checkpoint {path} is damaged: {join_first(found)}; {then}", whole)

    def list_resumable(self) -> str:
        """The checkpoints that can be resumed, as the end of a sentence."""
        *earlier, newest = [None, *(path for path in self.all() if (path / STATE).is_file())]
        if newest is None:
            return f"there is no checkpoint in {self._folder}"
        others = ", ".join(path.name for path in earlier if path)
        more = f"; before it there {'are' if ',' in others else 'is'} {others}" if others else ""
        return f"the newest whole checkpoint is {newest} (write {self._resume_hint.format(newest.name)}){more}"

    def all(self) -> list[Path]:
        """All checkpoints, oldest first. Each was whole when it appeared; what it lacks now is damage."""
        return sorted(path for path in self._folder.glob("step-*") if path.is_dir())

    def delete_after(self, step: int) -> None:
        """Remove what a roll-back to `step` undoes, and whatever a killed run left half written."""
        survivor = self._folder / f"step-{step:06d}"
        if survivor.is_dir():
            self._point_at(survivor)  # first of all: `latest` never names what is half gone
        if self.promoted_name > survivor.name:
            (self._folder / PROMOTED).unlink()
        for path in [p for p in self.all() if p.name > survivor.name]:
            self._remove(path)
        for path in self._folder.glob(".*.tmp"):
            path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)

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

    def _point_at(self, final: Path, name: str = LATEST) -> None:
        link = self._folder / f".{name}.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.replace(self._folder / name)
        _sync(self._folder)

    def _remove(self, path: Path) -> None:
        """By a rename first: a checkpoint whose removal is cut short must not look like a whole one."""
        gone = path.with_name(f".{path.name}.gone.tmp")
        shutil.rmtree(gone, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.replace(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _read_state(path: Path) -> dict | None:
    """The orchestrator's state in a checkpoint; None if it cannot be read."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _sync(*paths: Path) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
