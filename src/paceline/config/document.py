"""Merges the layers of a run file, and records which file or flag wrote each key."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from paceline.config.base import Section
from paceline.config.fields import ROOT, KeyPath, Spot, default_types, dotted, spot_at, value_at
from paceline.config.paths import resolve_paths


@dataclass(frozen=True)
class Origin:
    """The file or command-line flag that wrote a key."""

    source: str
    flag: str = ""
    folder: Path | None = None
    """The folder that relative paths written there start from; the working directory when None."""

    def place(self, path: KeyPath) -> str:
        """The place as the user would look for it."""
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
    root: Spot = ROOT
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

    def with_types(self) -> dict[str, Any]:
        """The table to validate: `[trainer.loss]` without a `type` means the default type."""
        table = copy.deepcopy(self.table)
        for path, named in default_types(self.root):
            value = value_at(path, table)
            if isinstance(value, dict):
                value.setdefault("type", named)
        return table

    def resolved(self) -> dict[str, Any]:
        """The table to validate, in which each path that a file wrote is absolute."""
        return resolve_paths(self.with_types(), lambda path: self.origin(path).folder)

    def _merge(self, target: dict[str, Any], layer: dict[Any, Any], at: KeyPath, origin: Origin) -> None:
        self._leave_type(target, layer, at)
        for key, value in layer.items():
            if isinstance(value, dict) and isinstance(target.get(key), dict):
                self._merge(target[key], value, (*at, key), origin)
            else:
                self._replace(target, (*at, key), value, origin)

    def _leave_type(self, target: dict[str, Any], layer: dict[Any, Any], at: KeyPath) -> None:
        """When a layer changes a section's `type`, what only the old type knows goes with it.

        Keys that neither type knows stay, so that a misspelled key is still reported.
        """
        spot = spot_at(at, self.table, self.root)
        if spot is None or not spot.is_choice:
            return
        old, new = spot.section(target), spot.section({"type": layer.get("type")})
        if old and new and old is not new:
            for key in old.model_fields.keys() - new.model_fields.keys():
                target.pop(key, None)

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
