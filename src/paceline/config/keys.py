"""Lists every key of the run file with type, default and meaning, read off the sections themselves."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from itertools import chain
from typing import Any

from pydantic import create_model

from paceline.config.base import Section
from paceline.config.errors import ConfigError
from paceline.config.fields import ROOT, SchemaNode, describe_expected, join_words, toml_text
from paceline.config.load import schema


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key of a table."""

    name: str
    kind: str
    """The values it takes, in words."""
    default: str
    """As TOML has it; `unset` where leaving it out means something else, `required` where it cannot be left out."""
    meaning: str


@dataclass(frozen=True, slots=True)
class ConfigTable:
    """A table of the run file, or what one `type` of it has besides the keys of all types."""

    path: str
    """Dotted, without the places of list elements; empty for the top of the file."""
    type: str
    listed: bool
    """It stands in double brackets, once for each element."""
    meaning: str
    keys: tuple[ConfigKey, ...]

    @property
    def header(self) -> str:
        """As the run file writes it."""
        brackets = f"[[{self.path}]]" if self.listed else f"[{self.path}]" if self.path else "top of the file"
        return f'{brackets} type = "{self.type}"' if self.type else brackets


def tables() -> list[ConfigTable]:
    """All tables, each once: where another key takes the same table, its meaning says which."""
    return list(_listing()[0])


def find_tables(asked: str) -> list[ConfigTable]:
    """The tables at or below a dotted key such as `trainer.optimizer`, `env.gsm8k` or `trainer.optimizer.lr`."""
    whole, seen = _listing()
    path = ""
    for part, spots in _descend(asked):  # to where the key is listed: `env.algo.std` is a key of `[algo]`
        below = next((node.element.tables for node in spots if node.element.tables), ())
        path = seen.get(below, _join_path(path, part)) if part and below else _join_path(path, part)
    if found := [table for table in whole if f"{_address(table)}.".startswith(f"{path}.")]:
        return found
    parent, _, name = path.rpartition(".")
    found = [
        replace(table, keys=(key,))
        for table in whole
        for key in table.keys
        if key.name == name and parent in (table.path, _address(table))
    ]
    if not found:
        known = {_address(table) for table in whole} | {_join_path(t.path, key.name) for t in whole for key in t.keys}
        similar = [f"`{near}`" for near in get_close_matches(path, known, n=3)]
        hint = f"; did you mean {join_words(similar)}?" if similar else ": `paceline config` lists them all"
        raise ConfigError([f"the run file has no key `{asked}`{hint}"])
    return found


def key_schema(asked: str) -> dict[str, Any]:
    """The JSON schema of what may stand at a dotted key; of the whole run file where none is given."""
    if not asked:
        return schema()
    find_tables(asked)  # or say that there is no such key
    parent, _, last = asked.replace("-", "_").rpartition(".")
    found = []
    for section, key in chain.from_iterable(_owners(node, last) for node in key_nodes(parent)):
        if key:  # alone in a section, it comes with the definitions that it needs itself
            fields: Any = {key: (section.model_fields[key].annotation, section.model_fields[key])}
            section = create_model("OneKey", **fields)
        whole = section.model_json_schema()
        defined = {name: whole[name] for name in whole.keys() & {"$defs"}}
        found.append(whole["properties"][key] | defined if key else whole)
    once = [fragment for place, fragment in enumerate(found) if fragment not in found[:place]]
    return once[0] if len(once) == 1 else {"anyOf": once}


def key_nodes(asked: str) -> list[SchemaNode]:
    """What may stand at a dotted key, in any type of the sections above it; nothing where there is no such key."""
    return [*_descend(asked)][-1][1]


@cache
def _listing() -> tuple[tuple[ConfigTable, ...], dict[tuple, str]]:
    """All tables, each once, and the path under which each group of sections is listed."""
    seen: dict[tuple, str] = {}
    return tuple(_tables(ROOT, "", False, seen)), seen


def _descend(asked: str) -> Iterator[tuple[str, list[SchemaNode]]]:
    """The parts of a dotted key, each with what may stand there; the top of the file first."""
    spots = [ROOT]
    yield "", spots
    for part in asked.replace("-", "_").split("."):
        if part and not part.isdecimal():
            owners = chain.from_iterable(_owners(node, part) for node in spots)
            spots = [
                SchemaNode.of_field(section.model_fields[key]) if key else SchemaNode.of(section)
                for section, key in owners
            ]
            yield part, spots


def _owners(node: SchemaNode, part: str) -> Iterator[tuple[type[Section], str]]:
    """The sections here that have such a key, with the key; and the section of such a type, without one."""
    yield from ((section, part) for section in node.element.tables if part in section.model_fields)
    yield from ((s, "") for type_, s in node.element.sections.items() if type_ and type_.replace("-", "_") == part)


def _tables(node: SchemaNode, path: str, listed: bool, seen: dict[tuple, str]) -> Iterator[ConfigTable]:
    sections = node.element.tables
    seen[sections] = path
    shared = [name for name in sections[0].model_fields if _is_shared(name, sections)]
    keys = [_key(sections[0], name, path, seen) for name in shared]
    choice = node.element.is_choice
    if choice:
        types = [f'"{type_}"' for type_ in node.element.sections]
        named = node.element.default_type() or node.default_type()
        default = f'"{named}"' if named else "required"
        keys.insert(
            0, ConfigKey("type", f"one of {join_words(types)}", default, "Which kind; each has keys of its own.")
        )
    meaning = "" if choice else _doc(sections[0])
    yield ConfigTable(path, "", listed, meaning, tuple(keys))
    nested = [(sections[0], name) for name in shared]
    for section in sections if choice else ():
        own = [name for name in section.model_fields if name not in (*shared, "type")]
        type_ = next(word for word, kind in node.element.sections.items() if kind is section)
        yield ConfigTable(path, type_, listed, _doc(section), tuple(_key(section, n, path, seen) for n in own))
        nested += [(section, name) for name in own]
    for section, name in nested:
        child = SchemaNode.of_field(section.model_fields[name])
        if child.element.tables and child.element.tables not in seen:
            yield from _tables(child, _join_path(path, name), child.is_list, seen)


def _key(section: type[Section], name: str, path: str, seen: dict[tuple, str]) -> ConfigKey:
    field = section.model_fields[name]
    node = SchemaNode.of_field(field)
    below = node.element.tables
    meaning = node.help or (_doc(below[0]) if len(below) == 1 else "")
    if below:
        header = ConfigTable(seen.get(below, _join_path(path, name)), "", node.is_list, "", ()).header
        meaning = f"{meaning} Keys: `{header}`.".strip()
    if field.is_required():
        default = "required"
    elif isinstance(node.default, Section) or (node.is_list and below):
        default = "its own defaults"
    else:
        default = "unset" if node.default is None else toml_text(node.default)
    return ConfigKey(name, describe_expected(node), default, " ".join(meaning.split()))


def _is_shared(name: str, sections: tuple[type[Section], ...]) -> bool:
    if name == "type" and len(sections) > 1:
        return False
    first, *others = (
        field and (field.annotation, field.metadata, field.default, field.description)
        for field in (section.model_fields.get(name) for section in sections)
    )
    return all(other == first for other in others)


def _doc(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split())


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}".strip(".")


def _address(table: ConfigTable) -> str:
    return _join_path(table.path, table.type.replace("-", "_"))
