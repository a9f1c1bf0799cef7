"""Writing safetensors files, with a full disk told as what it is."""

import errno
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from paceline.model.tensors import save_file
from paceline.model.weights import Array


@contextmanager
def writing() -> Generator[None]:
    """Safetensors wraps the system's refusals into an error of its own: here they are `OSError` again."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(error)) from error


def write_tensors(tensors: Mapping[str, Array], path: Path, notes: dict[str, str] | None = None) -> None:
    with writing():
        save_file(tensors, path, notes)
