"""Merges the layers of a run file, records which file or flag wrote each key, and resolves its relative paths.

A path is relative to the file that holds it. One that does not exist there but does in the working directory means the
latter, as it did before run files had folders of their own.
"""

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from paceline.config.base import PathKey, Section
from paceline.config.fields import ROOT, KeyPath, SchemaNode, default_types, dotted, node_at, value_at


@dataclass(frozen=True)
class Origin:
    """The file or command-line flag that wrote a key."""

    source: str
    flag: str = ""
    folder: Path | None = None
    """The folder that relative paths written there start from; the working directory when None."""

    def place(self, path: KeyPath) -> str:
        return ": ".join(part for part in (self.source, self.flag or dotted(path)) if part)


COMMAND_LINE = "command line"
PYTHON = "paceline.train"
"""The source of keyword arguments, as messages name it."""


def plain_value(value: Any) -> Any:
    """A value as a run file would hold it: sections and paths that were given as objects become tables and text."""
    if isinstance(value, Section):
        named = value.model_fields_set | ({"type"} & type(value).model_fields.keys())
        return {key: plain_value(getattr(value, key)) for key in type(value).model_fields if key in named}
    if isinstance(value, Mapping):
        return {key: plain_value(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain_value(entry) for entry in value]
    return str(value) if isinstance(value, PurePath) else value


@dataclass
class ConfigDocument:
    """Nested tables as they will be validated. Later layers win: tables merge, lists and values replace."""

    table: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    root: SchemaNode = ROOT
    """The schema of the whole table: a run file, or one section that is made in Python."""

    def merge(self, layer: dict[str, Any], origin: Origin) -> None:
        self._merge(self.table, layer, (), origin)

    def put(self, path: KeyPath, value: Any, origin: Origin, *, whole: bool = False) -> None:
        """Write one value, making the tables on the way. Lists on the way must exist. A table merges into the one that
        is there, unless it is given `whole`."""
        node: Any = self.table
        for depth, key in enumerate(path[:-1], start=1):
            here = value_at((key,), node)
            if not isinstance(here, dict | list):
                self._replace(node, path[:depth], {}, origin)
            node = node[key]
        if whole:
            self._replace(node, path, value, origin)
        elif isinstance(node, dict):
            self._merge(node, {path[-1]: value}, path[:-1], origin)
        elif isinstance(value, dict) and isinstance(node[path[-1]], dict):
            self._merge(node[path[-1]], value, path, origin)
        else:
            self._replace(node, path, value, origin)

    def origin(self, path: KeyPath) -> Origin:
        """The origin of this key, or else of the nearest table around it."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return Origin(COMMAND_LINE)

    def table_with_types(self) -> dict[str, Any]:
        """The table to validate: `[trainer.loss]` without a `type` means the default type."""
        table = copy.deepcopy(self.table)
        for path, named in default_types(self.root):
            value = value_at(path, table)
            if isinstance(value, dict):
                value.setdefault("type", named)
        return table

    def resolve(self) -> dict[str, Any]:
        """The table to validate, in which each path that a file wrote is absolute."""
        return resolve_paths(self.table_with_types(), lambda path: self.origin(path).folder)

    def _merge(self, target: dict[str, Any], layer: dict[Any, Any], at: KeyPath, origin: Origin) -> None:
        node = node_at(at, self.table, self.root)
        if node is not None and node.is_choice:
            old, new = node.section(target), node.section({"type": layer.get("type")})
            if old and new and old is not new:
                # What only the old type knows goes with it. Keys that neither knows stay, to be reported.
                for key in old.model_fields.keys() - new.model_fields.keys():
                    target.pop(key, None)
        for key, value in layer.items():
            if isinstance(value, dict) and isinstance(target.get(key), dict):
                self._merge(target[key], value, (*at, key), origin)
            else:
                self._replace(target, (*at, key), value, origin)

    def _replace(self, node: Any, path: KeyPath, value: Any, origin: Origin) -> None:
        node[path[-1]] = copy.deepcopy(value)
        for stale in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[stale]
        for below in _paths(value, path):
            self.origins[below] = origin


def _paths(value: Any, at: KeyPath) -> Iterator[KeyPath]:
    yield at
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from _paths(entry, (*at, key))


Folder = Callable[[KeyPath], Path | None]
"""The folder that relative paths at a place of the run file start from; None leaves them as they are."""
_DATA_FILE = re.compile(r"[^@]*\.(?:jsonl|json|csv|parquet|arrow)")
"""A dataset that can only be a file; a name of the hub has an @, a scheme no such ending."""


def resolve_paths(table: dict[str, Any], folder: Folder, *, only_existing: bool = False) -> dict[str, Any]:
    """A copy of a run file's table with absolute paths in every key that is marked as a path.

    A path that exists nowhere is placed beside the file, where the message about it should look for it;
    `only_existing` leaves it as it is.
    """

    def resolve(key: PathKey, path: KeyPath, text: str) -> str:
        base = folder(path)
        return text if base is None else _resolve(key.kind, text, base, only_existing)

    return _visit(ROOT, table, (), resolve)


def files_of(table: dict[str, Any], folder: Path) -> dict[str, Path]:
    """The files and folders a run file names, by the words it names them with."""
    named: dict[str, Path] = {}

    def note(key: PathKey, _: KeyPath, text: str) -> str:
        place = _split(key.kind, text)[0]
        if place and _exists(key.kind, folder / place):
            named[place] = folder / place
        return text

    _visit(ROOT, table, (), note)
    return named


def _visit(node: SchemaNode | None, value: Any, at: KeyPath, change: Callable[[PathKey, KeyPath, str], str]) -> Any:
    key = next((note for note in node.constraints if isinstance(note, PathKey)), None) if node else None
    if key is not None:  # one path, a list of them, or a table that weighs them: `{"a.jsonl" = 3.0}`
        if isinstance(value, str):
            return change(key, at, value)
        if isinstance(value, list):
            return [_visit(node, entry, (*at, i), change) for i, entry in enumerate(value)]
        if isinstance(value, dict):
            return {_visit(node, name, (*at, name), change): entry for name, entry in value.items()}
        return value
    if isinstance(value, dict):
        section = node.section(value) if node else None
        child = {k: node.child(k, section) if node else None for k in value}
        return {k: _visit(child[k], entry, (*at, k), change) for k, entry in value.items()}
    if isinstance(value, list):
        return [_visit(node.child(i, None) if node else None, v, (*at, i), change) for i, v in enumerate(value)]
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
            is_path = kind in ("file", "import", "module", "checkpoint") or (
                bool(_DATA_FILE.fullmatch(place)) if kind == "dataset" else place.startswith(("./", "../"))
            )
            if only_existing or not is_path:
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
