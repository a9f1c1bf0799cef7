"""Weights kept where engines in other processes find them, and where the trainer cannot change them any more."""

import asyncio
import dataclasses
import uuid
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from paceline.inference.base import EngineError
from paceline.inference.stored import StoredTensors
from paceline.model.weights import WeightUpdate


class Shelf:
    """A folder with the newest full weights as one safetensors file; older ones are removed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._newest: Path | None = None

    async def keep(self, update: WeightUpdate) -> WeightUpdate:
        """The same update, its tensors in a file of this folder."""
        tensors = update.tensors
        if isinstance(tensors, StoredTensors) and [file.resolve().parent for file in tensors.files] == [self.folder]:
            return update
        return dataclasses.replace(update, tensors=await asyncio.to_thread(self._write, update))

    def clear(self) -> None:
        """Remove what lies there of ours."""
        if self._newest is not None:
            self._newest.unlink(missing_ok=True)
            self._newest = None

    def _write(self, update: WeightUpdate) -> StoredTensors:
        name = f"{update.version}-{uuid.uuid4().hex[:12]}"
        half, whole = self.folder / f"{name}.part", self.folder / f"{name}.safetensors"
        try:
            save_file({name: _plain(tensor) for name, tensor in update.tensors.items()}, half)
            half.rename(whole)  # a reader never sees half a file
        except OSError as error:
            half.unlink(missing_ok=True)
            raise EngineError(f"the weights cannot be written to {self.folder}: {error}") from error
        self.clear()
        self._newest = whole
        return StoredTensors([whole])


def copied(update: WeightUpdate) -> WeightUpdate:
    """The same update in memory of its own: right for adapters, which are small."""
    return dataclasses.replace(
        update, tensors={name: _plain(tensor).clone() for name, tensor in update.tensors.items()}
    )


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
