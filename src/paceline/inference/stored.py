"""Weights that lie in files and are read only where they are needed."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from paceline.inference.base import EngineError, RequestError
from paceline.model.tensors import framework, read_file
from paceline.model.weights import Array

if TYPE_CHECKING:
    from paceline.model.delta import WeightDelta


class StoredTensors(Mapping[str, Array]):
    """Tensors by name. Another process can be given the files instead of the bytes.

    `deltas` are files too: what was changed, one after the other, since the safetensors files were written.
    """

    def __init__(self, files: Sequence[Path], deltas: Sequence[Path] = ()) -> None:
        self.files, self.deltas = tuple(files), tuple(deltas)
        self._tensors: dict[str, Array] | None = None
        self._names = [name for file in files for name in _names(file)]

    def fill(self) -> None:
        """Read the files now; else the first access to a tensor does."""
        if self._tensors is None:
            try:
                tensors = {name: tensor for file in self.files for name, tensor in read_file(file).items()}
            except (SafetensorError, OSError) as error:
                raise EngineError(f"the weights cannot be read any more: {error}") from error
            for file in self.deltas:
                _apply(tensors, file)
            self._tensors = tensors

    def forget(self) -> None:
        """Give the memory back; the files are still there."""
        self._tensors = None

    def __getitem__(self, name: str) -> Array:
        self.fill()
        assert self._tensors is not None
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_delta(data: bytes) -> "WeightDelta":
    """A delta from received bytes."""
    from paceline.model.delta import DeltaError, WeightDelta  # which needs torch

    try:
        return WeightDelta(data)
    except DeltaError as error:
        raise RequestError(str(error)) from error


def open_delta(file: Path) -> "WeightDelta":
    """A delta that lies in a file."""
    from paceline.model.delta import DeltaError, WeightDelta

    try:
        return WeightDelta(file.read_bytes())
    except (OSError, DeltaError) as error:
        raise EngineError(f"{file.name} cannot be read: {error}") from error


def _apply(tensors: dict[str, Array], file: Path) -> None:
    """The fingerprint that goes with the update proves the whole chain, so the links are not proved one by one."""
    from paceline.model.delta import DeltaError

    delta = open_delta(file)
    try:
        delta.check_fit(tensors)
        delta.write(tensors)
    except DeltaError as error:
        raise EngineError(f"{file.name} does not fit the weights before it: {error}") from error


def _names(file: Path) -> list[str]:
    """The tensors a file holds, from its header: a damaged file is found before anything is loaded."""
    try:
        with safe_open(file, framework=framework()) as opened:
            return list(opened.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise RequestError(f"{file.name} cannot be read: {error}") from error
