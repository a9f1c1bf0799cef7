"""Weights that lie in files and are read only where they are needed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from paceline.inference.base import EngineError, RequestError
from paceline.model.delta import Delta, DeltaError

KINDS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Types by the names a safetensors file has for them."""


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name. Another process can be given the files instead of the bytes.

    `deltas` are files too: what was changed, one after the other, since the safetensors files were written.
    """

    def __init__(self, files: Sequence[Path], deltas: Sequence[Path] = ()) -> None:
        self.files, self.deltas = tuple(files), tuple(deltas)
        self._tensors: dict[str, Tensor] | None = None
        self._names = [name for file in files for name in _names(file)]

    def fill(self) -> None:
        """Read the files now; else whoever first looks at a tensor does."""
        if self._tensors is None:
            try:
                tensors = {name: tensor for file in self.files for name, tensor in load_file(file).items()}
            except (SafetensorError, OSError) as error:
                raise EngineError(f"the weights cannot be read any more: {error}") from error
            for file in self.deltas:
                _apply(tensors, file)
            self._tensors = tensors

    def forget(self) -> None:
        """Give the memory back; the files are still there."""
        self._tensors = None

    def __getitem__(self, name: str) -> Tensor:
        self.fill()
        assert self._tensors is not None
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def tensors_in(row: Tensor) -> dict[str, Tensor]:
    """The tensors of a safetensors file that lies in memory as a row of bytes: views of it, nothing is copied."""
    try:
        start = 8 + int.from_bytes(bytes(row[:8].tolist()), "little")
        header = json.loads(bytes(row[8:start].numpy()))
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                low, high = entry["data_offsets"]
                raw = row[start + low : start + high]
                kind = KINDS[entry["dtype"]]
                raw = raw if raw.data_ptr() % kind.itemsize == 0 else raw.clone()  # numbers begin at their own width
                found[name] = raw.view(kind).view(entry["shape"])
        return found
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise RequestError(f"these {len(row)} bytes are no safetensors file: {error}") from error


def read_delta(data: bytes) -> Delta:
    """A delta that somebody sent."""
    try:
        return Delta(data)
    except DeltaError as error:
        raise RequestError(str(error)) from error


def open_delta(file: Path) -> Delta:
    """A delta that lies in a file."""
    try:
        return Delta(file.read_bytes())
    except (OSError, DeltaError) as error:
        raise EngineError(f"{file.name} cannot be read: {error}") from error


def _apply(tensors: dict[str, Tensor], file: Path) -> None:
    """The fingerprint that goes with the update proves the whole chain, so the links are not proved one by one."""
    delta = open_delta(file)
    try:
        delta.check_fit(tensors)
        delta.write(tensors)
    except DeltaError as error:
        raise EngineError(f"{file.name} does not fit the weights before it: {error}") from error


def _names(file: Path) -> list[str]:
    """The tensors a file holds, from its header: a damaged file is found before anything is loaded."""
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise RequestError(f"{file.name} cannot be read: {error}") from error
