"""Resolves the relative paths of a run file: each is relative to the file that holds it.

A path that does not exist there but does in the working directory means the latter, as it did before run files had
folders of their own.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.config.base import PathKey
from paceline.config.fields import ROOT, KeyPath, Spot

Folder = Callable[[KeyPath], Path | None]
"""The folder that relative paths at a place of the run file start from; None leaves them as they are."""
_DATA_FILE = re.compile(r"[^@]*\.(?:jsonl|json|csv|parquet|arrow)")
"""A dataset that can only be a file; a name of the hub has an @, a scheme no such ending."""


def resolve_paths(table: dict[str, Any], folder: Folder, *, only_existing: bool = False) -> dict[str, Any]:
    """A copy of a run file's table with absolute paths in every key that is marked as a path.

    A path that exists nowhere is placed beside the file, where the message about it should look for it;
    `only_existing` leaves it as it is.
    """
    return _walk(ROOT, table, (), folder, only_existing)


def files_of(table: dict[str, Any], folder: Path) -> dict[str, Path]:
    """The files and folders a run file names, by the words it names them with."""
    named: dict[str, Path] = {}

    def note(kind: str, text: str) -> str:
        place, _ = _split(kind, text)
        if place and _exists(kind, folder / place):
            named[place] = folder / place
        return text

    _visit(ROOT, table, (), lambda key, _, text: note(key.kind, text))
    return named


def _walk(spot: Spot, value: Any, at: KeyPath, folder: Folder, only_existing: bool) -> Any:
    def resolve(key: PathKey, path: KeyPath, text: str) -> str:
        base = folder(path)
        return text if base is None else _resolve(key.kind, text, base, only_existing)

    return _visit(spot, value, at, resolve)


def _visit(spot: Spot | None, value: Any, at: KeyPath, change: Callable[[PathKey, KeyPath, str], str]) -> Any:
    """A copy of a value in which `change` was applied to every path."""
    key = next((note for note in spot.constraints if isinstance(note, PathKey)), None) if spot else None
    if key is not None:
        return _change(value, at, lambda path, text: change(key, path, text))
    if isinstance(value, dict):
        section = spot.section(value) if spot else None
        child = {k: spot.child(k, section) if spot else None for k in value}
        return {k: _visit(child[k], entry, (*at, k), change) for k, entry in value.items()}
    if isinstance(value, list):
        return [_visit(spot.child(i, None) if spot else None, v, (*at, i), change) for i, v in enumerate(value)]
    return value


def _change(value: Any, at: KeyPath, change: Callable[[KeyPath, str], str]) -> Any:
    """One path, a list of them, or a table that weighs them: `{"a.jsonl" = 3.0}`."""
    if isinstance(value, str):
        return change(at, value)
    if isinstance(value, list):
        return [_change(entry, (*at, i), change) for i, entry in enumerate(value)]
    if isinstance(value, dict):
        return {_change(key, (*at, key), change): entry for key, entry in value.items()}
    return value


def _resolve(kind: str, text: str, folder: Path, only_existing: bool) -> str:
    place, rest = _split(kind, text)
    if not place or (kind == "checkpoint" and place == "latest"):
        return text
    try:
        found = Path(place).expanduser()
    except RuntimeError:  # `~stranger`: there is no such user
        return text
    if not found.is_absolute():
        beside, here = folder / found, Path.cwd() / found
        found = next((path for path in (beside, here) if _exists(kind, path)), None)
        if found is None:
            if only_existing or not _surely_a_path(kind, place):
                return text
            found = beside
    before = text[: len(text) - len(place) - len(rest)]
    return f"{before}{os.path.normpath(found)}{rest}"


def _split(kind: str, text: str) -> tuple[str, str]:
    """The part of a value that may be a path, and what follows it; what stands before it is left alone."""
    if kind == "import":
        place, colon, name = text.rpartition(":")
        return (place, colon + name) if place.endswith(".py") else ("", text)
    if kind == "module":
        return (text, "") if text.endswith(".py") else ("", text)
    if kind == "dataset" and not _DATA_FILE.fullmatch(text):
        # `train@folder` reads a folder as `train@owner/name` reads the hub.
        split, at, place = text.partition("@")
        return (place, "") if at and split and ":" not in place else ("", text)
    return text, ""


def _exists(kind: str, path: Path) -> bool:
    """A model is a folder, so that a file which happens to have a hub name's name is not taken for one."""
    try:
        return path.is_dir() if kind == "model" else path.exists()
    except OSError:  # a text that is too long for a path
        return False


def _surely_a_path(kind: str, place: str) -> bool:
    if kind in ("file", "import", "module", "checkpoint"):
        return True
    if kind == "dataset":
        return bool(_DATA_FILE.fullmatch(place))
    return place.startswith(("./", "../"))
