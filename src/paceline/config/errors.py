"""Errors as sentences for the user: where, what is wrong, what to write instead."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from paceline.config.base import Section
from paceline.config.document import COMMAND_LINE, ConfigDocument, Origin, plain_value
from paceline.config.fields import (
    ROOT,
    KeyPath,
    SchemaNode,
    correction_hint,
    describe_expected,
    describe_given,
    dotted,
    header,
    in_backticks,
    join_words,
    node_at,
    path_of,
    value_at,
)
from paceline.config.foreign_names import foreign_keys, foreign_places, nearest_keys
from paceline.config.orchestrator_layout import translate_layout
from paceline.errors import PacelineError

Options = TypeVar("Options", bound=BaseModel)


class ConfigError(PacelineError, ValueError):
    """A run file or command line that cannot be used. The message has one line per problem.

    A `ValueError` too, as pydantic's own: so code that guards `RunConfig(...)` keeps working.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


def options_from_flags(kind: type[Options], flags: Mapping[str, object]) -> Options:
    """The options of a command that reads no run file; flags that are None have their defaults."""
    try:
        return kind.model_validate({key: value for key, value in flags.items() if value is not None})
    except ValidationError as error:
        problems = []
        for detail in error.errors(include_url=False):
            place = "".join(f"--{str(part).replace('_', '-')}: " for part in detail["loc"][:1])
            problems.append(f"{place}{detail['msg'].removeprefix('Value error, ')}")
        raise ConfigError(problems) from None


EXPLAINED_ERRORS = ("extra_forbidden", "missing", "union_tag_invalid", "union_tag_not_found", "value_error")
"""Kinds of pydantic's errors with sentences of their own; all others are about a value that does not fit."""


def explain(error: ValidationError, document: ConfigDocument) -> list[str]:
    """One sentence per problem that pydantic found, in its order."""
    details = error.errors(include_url=False)
    paths = [path_of(detail["loc"], document.root) for detail in details]
    refused = {path for detail, path in zip(details, paths, strict=True) if detail["type"] == "value_error"}
    foreign = translate_layout(document.table)
    sentences = [f"{document.origin(path).place(path)}: {answer}" for path, answer in foreign.items()]
    for detail, path in zip(details, paths, strict=True):
        if any(path == other[: len(path)] or other == path[: len(other)] for other in foreign if path):
            continue  # answered already
        # Where any of several kinds of value may stand, each says why it is not the one. If one of them looked inside
        # the value, or read it whole, that one was meant, and the others have nothing to add.
        meant = path in refused or any(path == other[: len(path)] != other for other in paths)
        if detail["type"] in EXPLAINED_ERRORS or not meant:
            sentences += _sentences(path, detail, document)
    # A union of plain values reports one problem per member, and all read alike here.
    return list(dict.fromkeys(sentences))


def explain_values(
    error: ValidationError, values: Mapping[str, object], section: type[Section], source: str = ""
) -> list[str]:
    """The same sentences for values that Python gave to a section, or to a call (`source`) that makes one of them."""
    origin = Origin(source or section.__name__)
    document = ConfigDocument(origins={(): origin}, root=SchemaNode.of(section))
    document.merge(plain_value(values), origin)
    return explain(error, document)


def _sentences(path: KeyPath, detail: ErrorDetails, document: ConfigDocument) -> list[str]:
    kind, at, table = detail["type"], path[:-1], document.table_with_types()
    if kind == "missing" and isinstance(path[-1], int):
        kind, path = "too_short", at  # a tuple; the list as a whole is what is wrong
    place = document.origin(path).place(path)
    known = node_at(path, table, document.root)
    node = known or SchemaNode.of(object)
    types = list(node.sections)
    match kind:
        case "value_error":  # a validator's own sentences; a rule over several keys names every source of keys
            flags = any(origin.flag for origin in document.origins.values())
            if not path and flags and not place.startswith(COMMAND_LINE):
                place = f"{place} and {COMMAND_LINE}"
            sentences = str(detail.get("ctx", {}).get("error", detail["msg"])).splitlines()
            return [f"{place}: {sentence}" for sentence in sentences]
        case "extra_forbidden":
            header, hint = _header(at, table, document.root), _hint(path, document)
            return [f"{place}: there is no key `{path[-1]}` {header}; {hint}"]
        case "missing":
            blamed = (*at, "type") if (*at, "type") in document.origins else at
            place = document.origin(blamed).place(at)
            meaning = " ".join(node.help.split()).partition(". ")[0].rstrip(".") or describe_expected(node)
            return [f"{place}: `{path[-1]}` is missing; it takes {meaning if known else 'a value'}"]
        case "union_tag_not_found":
            return [f"{place}: `type` is missing: add type = {join_words(map(describe_given, types))}"]
        case "union_tag_invalid":
            path = (*path, "type")
            written = value_at(path, document.table)
            near = get_close_matches(str(written), types, n=1)
            hint = f"did you mean {describe_given(near[0])}? The" if near else "the"
            problem = (
                f"there is no type {describe_given(written)}; {hint} types are {join_words(in_backticks(types), 'and')}"
            )
            return [f"{document.origin(path).place(path)}: {problem}"]
    value = value_at(path, document.table)
    hint = correction_hint(node, value, path)
    return [f"{place}: expected {describe_expected(node)}, got {describe_given(value)}{hint}"]


def _hint(path: KeyPath, document: ConfigDocument) -> str:
    *at, key = path
    table = document.table_with_types()
    node = node_at(tuple(at), table, document.root) or SchemaNode.of(object)
    section = node.section(value_at(tuple(at), table))
    siblings = list(section.model_fields) if section else []
    if owners := [name for name, kind in node.sections.items() if key in kind.model_fields]:
        return f"it belongs to {dotted((*at, 'type'))} = {join_words(map(describe_given, owners))}"
    written = value_at(tuple(at), table)
    likely = nearest_keys(path, [name for name in siblings if name not in written], document.root)
    moved = _foreign_table(path, value_at(path, document.table), document.root)
    if moved and not any(one[:-1] == tuple(at) for one in likely):  # it says more than a key like it elsewhere
        return join_words(moved, "and")
    if likely:
        dashes = "--" if document.origin(path).flag else ""
        return f"did you mean {join_words(in_backticks(dashes + dotted(one) for one in likely))}?"
    return f"the keys there are {join_words(in_backticks(siblings), 'and')}"


def _foreign_table(at: KeyPath, value: object, root: SchemaNode) -> list[str]:
    """For each key of another trainer's table where it stands in a run file; empty if the table is none."""
    leaves = list(_leaves(at, value))
    if not any(foreign_keys(path) for path in leaves):
        return []
    places = {dotted(path): in_backticks(map(dotted, foreign_places(path, root))) for path in leaves}
    return [f"{key} is {join_words(found) if found else 'nothing'} here" for key, found in places.items()]


def _leaves(at: KeyPath, value: object) -> Iterator[KeyPath]:
    """The keys of a table that hold no table, or one that has a name here."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        path = (*at, str(key))
        yield from _leaves(path, inner) if isinstance(inner, dict) and not foreign_keys(path) else (path,)


def _header(at: KeyPath, table: dict, root: SchemaNode) -> str:
    if not at:
        return "at the top level" if root == ROOT else f"in {root.sections[''].__name__}"
    name = f"[[{header(at)}]]" if isinstance(at[-1], int) else f"[{dotted(at)}]"
    node = node_at(at, table, root)
    chosen = value_at((*at, "type"), table)
    return f"in {name} of type `{chosen}`" if node and node.is_choice else f"in {name}"
