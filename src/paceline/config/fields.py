"""Maps each place of the run file to what may stand there, read off the section classes."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from paceline.config.base import Section
from paceline.config.run import RunConfig

KeyPath = tuple[str | int, ...]
"""`("env", 0, "group_size")`: keys and list indices from the top of the file."""


_PLAIN = re.compile(r"[A-Za-z0-9_-]+")


def is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def type_of(section: type[Section]) -> str:
    """The word a section is chosen by, or "" where there is nothing to choose."""
    field = section.model_fields.get("type")
    return get_args(field.annotation)[0] if field and get_origin(field.annotation) is Literal else ""


@dataclass(frozen=True)
class Spot:
    """The schema of one place: a section, one of several told apart by `type`, a list, a value."""

    annotation: Any
    constraints: tuple[Any, ...] = ()
    optional: bool = False
    default: Any = None
    help: str = ""

    @classmethod
    def of(cls, annotation: Any, constraints: Sequence[Any] = (), **about: Any) -> "Spot":
        """Look through `Annotated[...]` and `... | None`, which say nothing about the shape."""
        optional = False
        while True:
            args = get_args(annotation)
            if get_origin(annotation) is Annotated:
                notes = [note.metadata if isinstance(note, FieldInfo) else [note] for note in args[1:]]
                annotation, constraints = args[0], [*constraints, *chain.from_iterable(notes)]
            elif is_union(annotation) and NoneType in args:
                optional = True
                annotation = Union[tuple(arg for arg in args if arg is not NoneType)]  # noqa: UP007
            else:
                return cls(annotation, tuple(constraints), optional, **about)

    @classmethod
    def of_field(cls, field: FieldInfo) -> "Spot":
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        return cls.of(field.annotation, field.metadata, default=default, help=field.description or "")

    @cached_property
    def sections(self) -> dict[str, type[Section]]:
        """The sections that may stand here, by `type`; one without a choice has the type "". Empty for values."""
        choice = is_union(self.annotation)
        options = get_args(self.annotation) if choice else (self.annotation,)
        if not all(isinstance(option, type) and issubclass(option, Section) for option in options):
            return {}
        return {type_of(option) if choice else "": option for option in options}

    @property
    def is_choice(self) -> bool:
        return "" not in self.sections and bool(self.sections)

    @property
    def is_list(self) -> bool:
        return get_origin(self.annotation) in (list, tuple)

    @property
    def is_open(self) -> bool:
        """A table whose keys are the user's own."""
        return self.annotation in (dict, Any) or get_origin(self.annotation) is dict

    @cached_property
    def options(self) -> "list[Spot]":
        """The kinds of value of which any may stand here; none where there is only one, or where they are sections."""
        plain = is_union(self.annotation) and not self.sections
        return [Spot.of(option) for option in get_args(self.annotation)] if plain else []

    def default_type(self) -> str | None:
        return type_of(type(self.default)) if self.is_choice and isinstance(self.default, Section) else None

    def section(self, value: Any) -> type[Section] | None:
        """The section that `value`, as written, stands for."""
        if not self.is_choice:
            among = next((o.sections[""] for o in self.options if "" in o.sections), None)
            return self.sections.get("", among if isinstance(value, dict) else None)
        written = value.get("type", self.default_type()) if isinstance(value, dict) else None
        return self.sections.get(written) if isinstance(written, str) else None

    def child(self, key: str | int, section: type[Section] | None) -> "Spot | None":
        if section is not None:
            field = section.model_fields.get(str(key))
            return field and Spot.of_field(field)
        if self.is_list and isinstance(key, int):
            return Spot.of(get_args(self.annotation)[min(key, len(get_args(self.annotation)) - 1)])
        if self.is_open:
            return Spot.of((*get_args(self.annotation), Any, Any)[1])
        return next((child for o in self.options if (child := o.child(key, o.sections.get("")))), None)


ROOT = Spot.of(RunConfig)


def spot_at(path: KeyPath, table: Any, root: Spot = ROOT) -> Spot | None:
    """The schema at `path` of this table, or None where nothing may stand."""
    spot: Spot | None = root
    for key in path:
        if spot is None:
            return None
        spot = spot.child(key, spot.section(table))
        table = value_at((key,), table)
    return spot


def value_at(path: KeyPath, table: Any) -> Any:
    """The value written at `path`, or None."""
    for key in path:
        if isinstance(table, dict):
            table = table.get(key)
        elif isinstance(table, list) and isinstance(key, int) and key < len(table):
            table = table[key]
        else:
            return None
    return table


def path_of(location: Sequence[str | int], root: Spot = ROOT) -> KeyPath:
    """The path of a pydantic error location, which also names the union members it went through."""
    spot: Spot | None = root
    path: KeyPath = ()
    rest = list(location)
    while rest and spot is not None and (spot.sections or spot.is_list or spot.is_open or spot.options):
        named = spot.is_choice or bool(spot.options)
        section = spot.sections.get(str(rest.pop(0)) if named else "")
        if rest:
            path = (*path, rest.pop(0))
            spot = spot.child(path[-1], section)
    return path


@cache
def places(root: Spot = ROOT) -> tuple[tuple[KeyPath, Spot], ...]:
    """Every key of the run file, or of one section, as it is addressed; a list is represented by its element 0."""
    return tuple(_below(root, ()))


@cache
def default_types(root: Spot = ROOT) -> tuple[tuple[KeyPath, str], ...]:
    """The few keys whose section has a type of its own accord, and which."""
    return tuple((path, named) for path, spot in places(root) if (named := spot.default_type()))


def _below(spot: Spot, path: KeyPath) -> Iterator[tuple[KeyPath, Spot]]:
    among = [section for option in spot.options for section in option.sections.values()]
    for section in [*spot.sections.values(), *among]:
        for key, field in section.model_fields.items():
            child = Spot.of_field(field)
            yield (*path, key), child
            yield from _below(child, (*path, key))
    if spot.is_list:
        yield from _below(Spot.of(get_args(spot.annotation)[0]), (*path, 0))


def dotted(path: KeyPath) -> str:
    """The path as TOML would write it: a key that is no plain word, a file's name say, stands in quotes."""
    return ".".join(str(key) if _PLAIN.fullmatch(str(key)) else json.dumps(key, ensure_ascii=False) for key in path)
