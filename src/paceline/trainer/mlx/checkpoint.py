"""The trainer's part of a checkpoint in mlx."""

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from paceline.model.mlx.files import load_file
from paceline.model.saving import write_tensors
from paceline.trainer.base import TrainerError
from paceline.trainer.files import FILE, FOLDER, check_files, read_state, reading, write_state


def write(folder: Path, tensors: Mapping[str, mx.array], state: Mapping) -> None:
    write_tensors(tensors, folder / FILE)
    write_state(folder, state)


def read(folder: Path) -> tuple[dict[str, mx.array], dict]:
    """All tensors, in memory, and the state."""
    with reading(folder):
        state = read_state(folder)
        return _tensors(folder), state


def masters(folder: Path) -> dict[str, mx.array]:
    """The float32 weights of a checkpoint by parameter name."""
    check_files(folder)
    with reading(folder):
        tensors = _tensors(folder)
    return {name.removeprefix("master/"): t for name, t in tensors.items() if name.startswith("master/")}


def _tensors(folder: Path) -> dict[str, mx.array]:
    if (folder / FOLDER).is_dir():
        raise TrainerError(f"checkpoint {folder} was written by several ranks, which only torch can put together")
    return load_file(folder / FILE)
