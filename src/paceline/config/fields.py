"""Maps each place of the run file to what may stand there, read off the section classes, and says it in words."""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from itertools import chain
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import MinLen
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
class SchemaNode:
    """The schema of one place: a section, one of several told apart by `type`, a list, a value."""

    annotation: Any
    constraints: tuple[Any, ...] = ()
    optional: bool = False
    default: Any = None
    help: str = ""

    @classmethod
    def of(cls, annotation: Any, constraints: Sequence[Any] = (), **about: Any) -> "SchemaNode":
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
    def of_field(cls, field: FieldInfo) -> "SchemaNode":
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
    def options(self) -> "list[SchemaNode]":
        """The kinds of value of which any may stand here; none where there is only one, or where they are sections."""
        plain = is_union(self.annotation) and not self.sections
        return [SchemaNode.of(option) for option in get_args(self.annotation)] if plain else []

    @property
    def element(self) -> "SchemaNode":
        """The schema of a list's elements; of anything else its own."""
        return SchemaNode.of(get_args(self.annotation)[0]) if self.is_list else self

    @property
    def tables(self) -> tuple[type[Section], ...]:
        """The sections that may stand here, also beside plain values."""
        return (*self.sections.values(), *(section for o in self.options for section in o.sections.values()))

    def default_type(self) -> str | None:
        return type_of(type(self.default)) if self.is_choice and isinstance(self.default, Section) else None

    def section(self, value: Any) -> type[Section] | None:
        """The section that `value`, as written, stands for."""
        if not self.is_choice:
            among = next((o.sections[""] for o in self.options if "" in o.sections), None)
            return self.sections.get("", among if isinstance(value, dict) else None)
        written = value.get("type", self.default_type()) if isinstance(value, dict) else None
        return self.sections.get(written) if isinstance(written, str) else None

    def child(self, key: str | int, section: type[Section] | None) -> "SchemaNode | None":
        if section is not None:
            field = section.model_fields.get(str(key))
            return field and SchemaNode.of_field(field)
        if self.is_list and isinstance(key, int):
            return SchemaNode.of(get_args(self.annotation)[min(key, len(get_args(self.annotation)) - 1)])
        if self.is_open:
            return SchemaNode.of((*get_args(self.annotation), Any, Any)[1])
        return next((child for o in self.options if (child := o.child(key, o.sections.get("")))), None)


ROOT = SchemaNode.of(RunConfig)


def node_at(path: KeyPath, table: Any, root: SchemaNode = ROOT) -> SchemaNode | None:
    """The schema at `path` of this table, or None where nothing may stand."""
    node: SchemaNode | None = root
    for key in path:
        if node is None:
            return None
        node = node.child(key, node.section(table))
        table = value_at((key,), table)
    return node


def value_at(path: KeyPath, table: Any) -> Any:
    for key in path:
        if isinstance(table, dict):
            table = table.get(key)
        elif isinstance(table, list) and isinstance(key, int) and key < len(table):
            table = table[key]
        else:
            return None
    return table


def path_of(location: Sequence[str | int], root: SchemaNode = ROOT) -> KeyPath:
    """The path of a pydantic error location, which also names the union members it went through."""
    node: SchemaNode | None = root
    path: KeyPath = ()
    rest = list(location)
    while rest and node is not None and (node.sections or node.is_list or node.is_open or node.options):
        named = node.is_choice or bool(node.options)
        section = node.sections.get(str(rest.pop(0)) if named else "")
        if rest:
            path = (*path, rest.pop(0))
            node = node.child(path[-1], section)
    return path


@cache
def key_paths(root: SchemaNode = ROOT) -> tuple[tuple[KeyPath, SchemaNode], ...]:
    """Every key of the run file, or of one section, as it is addressed; a list is represented by its element 0."""
    return tuple(_paths_below(root, ()))


@cache
def default_types(root: SchemaNode = ROOT) -> tuple[tuple[KeyPath, str], ...]:
    """The few keys whose section has a type of its own accord, and which."""
    return tuple((path, named) for path, node in key_paths(root) if (named := node.default_type()))


def _paths_below(node: SchemaNode, path: KeyPath) -> Iterator[tuple[KeyPath, SchemaNode]]:
    for section in node.tables:
        for key, field in section.model_fields.items():
            child = SchemaNode.of_field(field)
            yield (*path, key), child
            yield from _paths_below(child, (*path, key))
    if node.is_list:
        yield from _paths_below(node.element, (*path, 0))


def header(path: KeyPath) -> str:
    """The path as a table's header has it, without places in lists: `env.judges`."""
    return dotted(tuple(key for key in path if isinstance(key, str)))


def dotted(path: KeyPath) -> str:
    """The path as TOML would write it: a key that is no plain word, a file's name say, stands in quotes."""
    return ".".join(str(key) if _PLAIN.fullmatch(str(key)) else json.dumps(key, ensure_ascii=False) for key in path)


SINGULAR = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a table"}
PLURAL = {int: "whole numbers", float: "numbers", str: "text"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def describe_expected(node: SchemaNode) -> str:
    kind = node.annotation
    if get_origin(kind) is Literal:
        values = [describe_given(value) for value in get_args(kind)]
        return f"one of {join_words(values)}" if len(values) > 1 else values[0]
    if node.sections:
        return "a table"
    if is_union(kind):
        return " or ".join(describe_expected(SchemaNode.of(option)) for option in get_args(kind))
    if node.is_list:
        return _list(node)
    noun = SINGULAR.get(get_origin(kind) or kind, "another value")
    notes = [(words, getattr(note, key, None)) for note in node.constraints for key, words in BOUNDS.items()]
    bounds = " and ".join(f"{words} {limit}" for words, limit in notes if limit is not None)
    return f"{noun}, {bounds}" if bounds else noun


def describe_given(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    if value is None:
        return "nothing"
    # JSON writes inf and nan in its own way; everything else here reads as it would in the file.
    text = str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def correction_hint(node: SchemaNode, value: Any, path: KeyPath = ("env",)) -> str:
    kind = node.annotation
    if node.is_list and isinstance(value, dict):
        return f"; write the header in double brackets, [[{header(path)}]]"
    if isinstance(value, str) and any({"name", "base_url"} <= table.model_fields.keys() for table in node.tables):
        return f'; write {{name = {describe_given(value)}, base_url = "http://HOST:PORT/v1"}}'
    if node.is_list and isinstance(value, str):
        return f"; write [{describe_given(value)}]"
    if get_origin(kind) is Literal:
        nearest = get_close_matches(str(value), map(str, get_args(kind)), n=1)
        return f"; did you mean {describe_given(nearest[0])}?" if nearest else ""
    if isinstance(value, float) and not math.isfinite(value):
        return "; it must be finite"
    if kind is int and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if kind in (int, float, bool) and isinstance(value, str):
        meant = type(toml_value(value.lower()))
        return f"; write {value.lower()}, without quotes" if meant in ((bool,) if kind is bool else (int, kind)) else ""
    return ""


def toml_text(value: Any) -> str:
    """A value in one line, as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_text(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)


def join_words(words: Iterable[str], last: str = "or") -> str:
    """`a, b or c`."""
    words = list(words)
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def in_backticks(words: Iterable[object]) -> Sequence[str]:
    return [f"`{word}`" for word in words]


def toml_value(text: str) -> Any:
    """The TOML value a text spells, or the text itself."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text


def _list(node: SchemaNode) -> str:
    kinds = get_args(node.annotation)
    element = SchemaNode.of(kinds[0])
    if get_origin(element.annotation) is Literal:
        return f"a list with any of {join_words(describe_given(value) for value in get_args(element.annotation))}"
    many = "tables" if element.sections else PLURAL.get(element.annotation, "values")
    if get_origin(node.annotation) is tuple:
        return f"a list of {len(kinds)} {many}"
    least = next((note.min_length for note in node.constraints if isinstance(note, MinLen)), 0)
    return f"a list of {many}, at least {least}" if least else f"a list of {many}"
