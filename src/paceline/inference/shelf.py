"""Weights kept where engines in other processes find them, and where the trainer cannot change them any more."""

import asyncio
import dataclasses
import uuid
from collections import deque
from pathlib import Path

from torch import Tensor

from paceline.inference.base import EngineError
from paceline.inference.stored import StoredTensors
from paceline.model.saving import write_tensors
from paceline.model.weights import WeightUpdate


class Shelf:
    """A folder with the newest full weights, a safetensors file each; all but the last `most` of ours are removed."""

    def __init__(self, folder: Path, most: int = 1) -> None:
        self.folder = folder.resolve()
        self._most = most
        self._ours: deque[Path] = deque()

    def adopt(self) -> None:
        """Take what lies there for ours: whoever wrote it had our place before us."""
        self._ours = deque(sorted(self.folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime))
        for half in self.folder.glob("*.part"):
            half.unlink(missing_ok=True)

    async def keep(self, update: WeightUpdate) -> WeightUpdate:
        """The same update, its tensors in a file of this folder."""
        tensors = update.tensors
        if isinstance(tensors, StoredTensors) and [file.resolve().parent for file in tensors.files] == [self.folder]:
            return update
        return dataclasses.replace(update, tensors=await asyncio.to_thread(self._write, update))

    def clear(self) -> None:
        """Remove what lies there of ours."""
        self._leave(0)

    def _leave(self, most: int) -> None:
        while len(self._ours) > most:
            self._ours.popleft().unlink(missing_ok=True)

    def _write(self, update: WeightUpdate) -> StoredTensors:
        name = f"{update.version}-{uuid.uuid4().hex[:12]}"
        half, whole = self.folder / f"{name}.part", self.folder / f"{name}.safetensors"
        try:
            write_tensors({name: _plain(tensor) for name, tensor in update.tensors.items()}, half)
            half.rename(whole)  # a reader never sees half a file
        except OSError as error:
            half.unlink(missing_ok=True)
            raise EngineError(
                f"the weights cannot be written to {self.folder} ({error.strerror}): make room, then --resume latest"
            ) from error
        self._ours.append(whole)
        self._leave(self._most)
        return StoredTensors([whole])


def copied(update: WeightUpdate) -> WeightUpdate:
    """The same update in memory of its own: right for adapters, which are small."""
    return dataclasses.replace(
        update, tensors={name: _plain(tensor).clone() for name, tensor in update.tensors.items()}
    )


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
