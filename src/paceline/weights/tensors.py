"""Reads and writes tensors as safetensors files and bytes, in torch or, without it, in mlx.

>>> import numpy
>>> {name: list(tensor.shape) for name, tensor in deserialize(serialize({"a": numpy.zeros((2, 3))})).items()}
{'a': [2, 3]}
"""

import errno
import importlib
import importlib.util
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from safetensors import SafetensorError

from paceline.weights.update import Array

LIBRARIES = {"torch": "safetensors.torch", "numpy": "safetensors.numpy", "mlx": "paceline.weights.mlx_arrays"}
"""The module that reads and writes each library's tensors."""


@cache
def framework() -> str:
    """The framework that tensors are read as, by safetensors' name for it."""
    return "pt" if importlib.util.find_spec("torch") is not None else "mlx"


def read_file(file: Path) -> dict[str, Array]:
    return dict(_library_of({}).load_file(file))


def deserialize(data: bytes) -> dict[str, Array]:
    return dict(_library_of({}).load(data))


def serialize(tensors: Mapping[str, Array], metadata: dict[str, str] | None = None) -> bytes:
    return _library_of(tensors).save({name: to_host(tensor) for name, tensor in tensors.items()}, metadata)


def to_host(tensor: Array) -> Array:
    """In the host's memory, in order, and free of gradients."""
    return tensor.detach().cpu().contiguous() if hasattr(tensor, "detach") else tensor


def clone_to_host(tensor: Array) -> Array:
    """The same numbers in memory of their own, on the host. An array of mlx never changes, so it needs none."""
    return to_host(tensor).clone() if hasattr(tensor, "detach") else tensor


def _library_of(tensors: Mapping[str, Array]) -> ModuleType:
    kind = type(next(iter(tensors.values()), None)).__module__.partition(".")[0]
    return importlib.import_module(LIBRARIES.get(kind) or LIBRARIES["torch" if framework() == "pt" else "mlx"])


@contextmanager
def raise_os_errors() -> Generator[None]:
    """Safetensors wraps the system's refusals into an error of its own: here they are `OSError` again."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(error)) from error


def write_tensors(tensors: Mapping[str, Array], path: Path, metadata: dict[str, str] | None = None) -> None:
    with raise_os_errors():
        _library_of(tensors).save_file({name: to_host(tensor) for name, tensor in tensors.items()}, path, metadata)
