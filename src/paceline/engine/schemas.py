"""Prepares regular expressions and JSON schemas for a grammar compiler, and refuses by name what it would misread.

Regular expressions are read as Python does (`re.fullmatch` with `re.ASCII`).
"""

import json
import math
import re
from collections.abc import Iterator
from re import _constants as codes  # ty: ignore[import-not-found]
from re import _parser as parser  # ty: ignore[import-not-found]
from typing import Any
from urllib.parse import unquote

from paceline.errors import RequestError

_PIECE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|\(\?P<\w+>|\(\?.?|.", re.DOTALL)
_LETTERS = set("dDwWsSnrtfvxu")
_SPACES = r" \t\n\r\f\v"
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
QUICK_STATES = 256
MOST_STATES = 4096
"""Of a compiled grammar. Compiling takes time and memory by this number, and repeats within repeats multiply it."""
MOST_DEPTH = 64
REPEATS = {
    "items": ("minItems", "maxItems"),
    "additionalProperties": ("minProperties", "maxProperties"),
    "patternProperties": ("minProperties", "maxProperties"),
    "propertyNames": ("minProperties", "maxProperties"),
}
"""Schemas inside a schema that repeat, and the keys that say how often."""
NOTES = {
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
    "$comment", "$anchor", "discriminator", "format",
}  # fmt: skip
"""Says something about a value but does not constrain it; the formats the compiler knows it does enforce."""
DEFINITIONS = {"$defs", "definitions"}
ONE_OF_KIND = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""The compiler looks at the first of these only, and not at what stands beside it."""
ALONE = {"patternProperties", "propertyNames", "minProperties", "maxProperties"}
"""Honoured where an object has no named properties."""
PLAIN = {
    "type", "properties", "required", "additionalProperties", "unevaluatedProperties", "items", "prefixItems",
    "unevaluatedItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
}  # fmt: skip


def rewrite_pattern(pattern: str) -> str:
    r"""The pattern for a compiler that always matches whole texts. What it would misread is refused by name.

    >>> rewrite_pattern(r"^(?P<word>a.\s[.])$")
    '(a[^\\n][ \\t\\n\\r\\f\\v][.])'
    """
    check_states(states(pattern), "the regular expression")
    pieces: list[str] = []
    in_class = False
    for found in _PIECE.finditer(pattern):
        piece, opened = found[0], in_class
        if piece[0] == "\\":
            pieces.append(_escape(piece, in_class))
            continue
        if in_class:
            in_class = piece != "]"
        elif piece == "[":
            in_class = True
            if pattern[found.end() :].removeprefix("^").startswith("]"):
                raise RequestError(r"the regular expression has a set that begins with `]`: write `\]`")
        pieces.append(piece if opened else _plain(piece, found.start() == 0, found.end() == len(pattern)))
    return "".join(pieces)


def _escape(piece: str, in_class: bool) -> str:
    letter = piece[1]
    if letter.isalnum() and letter not in _LETTERS:
        raise RequestError(f"the regular expression uses `{piece}`, which constrained output does not know")
    if letter == "s":
        return _SPACES if in_class else f"[{_SPACES}]"
    return piece


def _plain(piece: str, first: bool, last: bool) -> str:
    if piece == ".":
        return r"[^\n]"
    if piece in ("^", "$"):
        if not (first if piece == "^" else last):
            raise RequestError(
                f"the regular expression has `{piece}` inside: constrained output matches the whole text"
            )
        return ""
    if piece.startswith("(?P<"):
        return "("
    if piece.startswith("(?") and piece != "(?:":
        raise RequestError(f"the regular expression uses `{piece}`, which constrained output does not know")
    return piece


def states(pattern: str) -> int:
    """How many states a pattern has once its repeats are written out.

    >>> states("a(b|cd){2,10}"), states("a*"), states("((.{0,99}){0,99}){0,99}b")
    (31, 2, 970300)
    """
    try:
        return _states(parser.parse(pattern, re.ASCII))
    except RecursionError as error:
        raise RequestError("the regular expression nests its groups too deeply: use fewer levels") from error
    except (re.error, OverflowError) as error:
        raise RequestError(f"the regular expression is wrong: {error}") from error


def is_quick_pattern(pattern: str) -> bool:
    """Whether it is sure to be compiled in seconds: no repeat inside a repeat, and few states.

    >>> [is_quick_pattern(pattern) for pattern in ("a{3}|b*", "(a*b)*", ".{0,2000}")]
    [True, False, False]
    """
    return states(pattern) <= QUICK_STATES and _depth(parser.parse(pattern, re.ASCII)) < 2


def check_states(count: int, what: str) -> None:
    if count > MOST_STATES:
        raise RequestError(
            f"{what} is too large: its repeats and alternatives come to {count} states, and at most {MOST_STATES} are "
            "compiled; lower the upper bounds of what repeats"
        )


def _depth(parsed: Any) -> int:
    """Repeats inside one another."""
    depth = 0
    for code, given in parsed:
        if code in _REPEATS:
            depth = max(depth, 1 + _depth(given[2]))
        elif code is codes.SUBPATTERN:
            depth = max(depth, _depth(given[-1]))
        elif code is codes.BRANCH:
            depth = max(depth, *map(_depth, given[1]))
    return depth


def _states(parsed: Any) -> int:
    return sum(_item(code, given) for code, given in parsed)


def _item(code: Any, given: Any) -> int:
    if code in _REPEATS:
        least, most, repeated = given
        return _states(repeated) * (most if most != codes.MAXREPEAT else least + 1) + (most == codes.MAXREPEAT)
    if code is codes.SUBPATTERN:
        return _states(given[-1])
    if code is codes.BRANCH:
        return sum(map(_states, given[1]))
    return 1


def prepare_schema(source: str) -> str:
    """The schema as the compiler takes it."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not JSON: {error}") from error
    made = _schema(schema, "#", MOST_DEPTH)
    check_states(_size(made), "the JSON schema")
    _check_references(made, made, "#")
    return json.dumps(made)


def _size(schema: Any) -> int:
    """States of the grammar it becomes: what may repeat counts as often as it may."""
    if isinstance(schema, bool):
        return 1
    size = 1 + len(schema.get("enum", ())) + (states(schema["pattern"]) if "pattern" in schema else 0)
    for key, _, part in _parts(schema):
        bounds = REPEATS.get(key, ())
        size += _size(part) * max(1, *(schema[bound] for bound in bounds if type(schema.get(bound)) is int), 1)
    return size


def is_quick_schema(schema: str) -> bool:
    """Whether a prepared schema is sure to be compiled in seconds."""
    whole = json.loads(schema)
    return _size(whole) <= QUICK_STATES and all(map(is_quick_pattern, _patterns(whole)))


def _patterns(schema: Any) -> Iterator[str]:
    if isinstance(schema, bool):
        return
    if "pattern" in schema:
        yield schema["pattern"]
    for _, _, part in _parts(schema):
        yield from _patterns(part)


def _check_references(schema: Any, whole: Any, place: str) -> None:
    """A reference that leads nowhere would leave its place without any rule."""
    if isinstance(schema, bool):
        return
    if isinstance(reference := schema.get("$ref"), str) and not _leads(reference, whole):
        raise RequestError(f"JSON schema, {place}: `$ref` names `{reference}`, which is not in the schema")
    for key, name, part in _parts(schema):
        _check_references(part, whole, f"{place}/{key}" if name is None else f"{place}/{key}/{name}")


def _leads(reference: str, whole: Any) -> bool:
    """Whether a reference such as `#/$defs/item` finds a schema."""
    first, *steps = reference.split("/")
    found = whole
    for step in steps:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            return False
    return first == "#" and isinstance(found, dict | bool)


def _schema(schema: Any, place: str, depth: int) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise RequestError(f"JSON schema, {place}: a schema is an object, not {json.dumps(schema)[:40]}")
    if not depth:
        raise RequestError(f"the JSON schema is nested deeper than {MOST_DEPTH}")
    _refuse(schema, place)
    if "pattern" in schema:
        _check_pattern(schema, place)
    made = {key: value for key, value in schema.items() if key not in ("minLength", "maxLength", "uniqueItems")}
    for key, name, part in _parts(schema):
        within = f"{place}/{key}" if name is None else f"{place}/{key}/{name}"
        child = _schema(part, within, depth - 1)
        if name is None:
            made[key] = child
        elif isinstance(name, int):
            made[key] = [*made[key][:name], child, *made[key][name + 1 :]]
        else:
            made[key] = made[key] | {name: child}
    if "minLength" in schema or "maxLength" in schema:
        # The compiler's own lengths let control characters into strings, which JSON forbids; its patterns do not.
        made["pattern"] = f"^.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}$"
    return made


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, str | int | None, Any]]:
    """The schemas inside a schema: keyword, name or number under it, schema."""
    for key, value in schema.items():
        if key in ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames"):
            yield key, None, value
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            yield from ((key, number, part) for number, part in enumerate(value))
        elif key in ("properties", "patternProperties", *DEFINITIONS) and isinstance(value, dict):
            yield from ((key, name, part) for name, part in value.items())


def _refuse(schema: dict[str, Any], place: str) -> None:
    keys = {key for key in schema if key not in NOTES and key not in DEFINITIONS}
    if schema.get("uniqueItems") is False:
        keys.discard("uniqueItems")
    unknown = sorted(keys - PLAIN - ALONE - {*ONE_OF_KIND})
    if unknown:
        raise RequestError(f"JSON schema, {place}: constrained output cannot enforce `{unknown[0]}`")
    leading = next((key for key in ONE_OF_KIND if key in keys), None)
    if leading and (beside := sorted(keys - {leading, "type"})):
        raise RequestError(f"JSON schema, {place}: constrained output takes `{leading}` alone, not with `{beside[0]}`")
    if len(schema.get("allOf", ())) > 1:
        raise RequestError(f"JSON schema, {place}: constrained output takes one schema under `allOf`: merge them")
    if "properties" in keys and (beside := sorted(keys & ALONE)):
        raise RequestError(f"JSON schema, {place}: constrained output cannot enforce `{beside[0]}` with `properties`")
    if "multipleOf" in keys and schema.get("type") != "integer":
        raise RequestError(f"JSON schema, {place}: constrained output enforces `multipleOf` for integers only")
    for key in ("minLength", "maxLength"):
        if key in schema and not (type(schema[key]) is int and schema[key] >= 0):
            raise RequestError(f"JSON schema, {place}: `{key}` must be a whole number from 0 on")
    if schema.get("minLength", 0) > schema.get("maxLength", math.inf):
        raise RequestError(f"JSON schema, {place}: `minLength` is larger than `maxLength`")


def _check_pattern(schema: dict[str, Any], place: str) -> None:
    if {"minLength", "maxLength"} & schema.keys():
        raise RequestError(f"JSON schema, {place}: constrained output takes `pattern` or lengths, not both")
    if not isinstance(schema["pattern"], str):
        raise RequestError(f"JSON schema, {place}: `pattern` must be a string")
    try:
        rewrite_pattern(schema["pattern"])
    except RequestError as error:
        raise RequestError(f"JSON schema, {place}/pattern: {error}") from error
