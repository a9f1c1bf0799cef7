"""Safetensors by mlx itself: the package of that name takes its arrays for laid out in order, and knows no bfloat16."""

import io
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
from safetensors import SafetensorError


def save(arrays: Mapping[str, mx.array], notes: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    mx.save_safetensors(buffer, dict(arrays), notes)
    return buffer.getvalue()


def save_file(arrays: Mapping[str, mx.array], file: Path, notes: dict[str, str] | None = None) -> None:
    with Path(file).open("wb") as opened:  # Python's own, which says what the system refused
        mx.save_safetensors(opened, dict(arrays), notes)


def load(data: bytes) -> dict[str, mx.array]:
    return _read(io.BytesIO(data))


def load_file(file: Path) -> dict[str, mx.array]:
    with Path(file).open("rb") as opened:
        return _read(opened)


def _read(opened: io.BufferedIOBase) -> dict[str, mx.array]:
    try:
        arrays = mx.load(opened, format="safetensors")
        assert isinstance(arrays, dict)
        mx.eval(arrays)
    except RuntimeError as error:  # as the package says it of a file that is none, or half of one
        raise SafetensorError(str(error)) from error
    return arrays
