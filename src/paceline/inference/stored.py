"""Weights that lie in safetensors files and are read only where they are needed."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from paceline.inference.base import RequestError


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name. Another process can be given the files instead of the bytes."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self._tensors: dict[str, Tensor] | None = None
        self._names = [name for file in files for name in _names(file)]

    def fill(self) -> None:
        """Read the files now; else whoever first looks at a tensor does."""
        if self._tensors is None:
            self._tensors = {name: tensor for file in self.files for name, tensor in load_file(file).items()}

    def __getitem__(self, name: str) -> Tensor:
        self.fill()
        assert self._tensors is not None
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _names(file: Path) -> list[str]:
    """The tensors a file holds, from its header: a damaged file is found before anything is loaded."""
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise RequestError(f"{file.name} cannot be read: {error}") from error
