"""Rewrites regular expressions and JSON schemas for the grammar compiler; refuses what it misreads.

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

_TOKEN = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|\(\?P<\w+>|\(\?.?|.", re.DOTALL)
_ESCAPE_LETTERS = set("dDwWsSnrtfvxu")
_SPACES = r" \t\n\r\f\v"
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
QUICK_STATES = 256
MOST_STATES = 4096
"""Of a compiled grammar. Compiling takes time and memory by this number, and repeats within repeats multiply it."""
MOST_DEPTH = 64
REPEAT_BOUNDS = {
    "items": ("minItems", "maxItems"),
    "additionalProperties": ("minProperties", "maxProperties"),
    "patternProperties": ("minProperties", "maxProperties"),
    "propertyNames": ("minProperties", "maxProperties"),
}
"""Schemas inside a schema that repeat, and the keys that say how often."""
ANNOTATIONS = {
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
    "$comment", "$anchor", "discriminator", "format",
}  # fmt: skip
"""Says something about a value but does not constrain it; the formats the compiler knows it does enforce."""
DEFINITIONS = {"$defs", "definitions"}
EXCLUSIVE_KEYWORDS = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""The compiler looks at the first of these only, and not at what stands beside it."""
UNNAMED_KEYWORDS = {"patternProperties", "propertyNames", "minProperties", "maxProperties"}
"""Honoured where an object has no named properties."""
SUPPORTED_KEYWORDS = {
    "type", "properties", "required", "additionalProperties", "unevaluatedProperties", "items", "prefixItems",
    "unevaluatedItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
}  # fmt: skip


def rewrite_pattern(pattern: str) -> str:
    r"""The pattern for a compiler that always matches whole texts. What it would misread is refused by name.

    >>> rewrite_pattern(r"^(?P<word>a.\s[.])$")
    '(a[^\\n][ \\t\\n\\r\\f\\v][.])'
    """
    check_states(count_states(pattern), "the regular expression")
    pieces: list[str] = []
    in_class = False
    for found in _TOKEN.finditer(pattern):
        piece, opened = found[0], in_class
        if piece[0] == "\\":
            pieces.append(_rewrite_escape(piece, in_class))
            continue
        if in_class:
            in_class = piece != "]"
        elif piece == "[":
            in_class = True
            if pattern[found.end() :].removeprefix("^").startswith("]"):
                raise RequestError(r"the regular expression has a set that begins with `]`: write `\]`")
        pieces.append(piece if opened else _rewrite_token(piece, found.start() == 0, found.end() == len(pattern)))
    return "".join(pieces)


def _rewrite_escape(piece: str, in_class: bool) -> str:
    letter = piece[1]
    if letter.isalnum() and letter not in _ESCAPE_LETTERS:
        raise RequestError(f"the regular expression uses `{piece}`, which constrained output does not know")
    if letter == "s":
        return _SPACES if in_class else f"[{_SPACES}]"
    return piece


def _rewrite_token(piece: str, first: bool, last: bool) -> str:
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


def count_states(pattern: str) -> int:
    """How many states a pattern has once its repeats are written out.

    >>> count_states("a(b|cd){2,10}"), count_states("a*"), count_states("((.{0,99}){0,99}){0,99}b")
    (31, 2, 970300)
    """
    return _measure_pattern(pattern)[0]


def is_quick_pattern(pattern: str) -> bool:
    """Whether it is sure to be compiled in seconds: no repeat inside a repeat, and few states.

    >>> [is_quick_pattern(pattern) for pattern in ("a{3}|b*", "(a*b)*", ".{0,2000}")]
    [True, False, False]
    """
    states, depth = _measure_pattern(pattern)
    return states <= QUICK_STATES and depth < 2


def check_states(count: int, what: str) -> None:
    if count > MOST_STATES:
        raise RequestError(
            f"{what} is too large: its repeats and alternatives come to {count} states, and at most {MOST_STATES} are "
            "compiled; lower the upper bounds of what repeats"
        )


def _measure_pattern(pattern: str) -> tuple[int, int]:
    """The pattern's states, and how many of its repeats are inside one another."""
    try:
        return _measure(parser.parse(pattern, re.ASCII))
    except RecursionError as error:
        raise RequestError("the regular expression nests its groups too deeply: use fewer levels") from error
    except (re.error, OverflowError) as error:
        raise RequestError(f"the regular expression is wrong: {error}") from error


def _measure(parsed: Any) -> tuple[int, int]:
    states = depth = 0
    for code, operand in parsed:
        size, inside = 1, 0
        if code in _REPEATS:
            least, most, repeated = operand
            size, inside = _measure(repeated)
            endless = most == codes.MAXREPEAT
            size, inside = size * (least + 1 if endless else most) + endless, inside + 1
        elif code is codes.SUBPATTERN:
            size, inside = _measure(operand[-1])
        elif code is codes.BRANCH:
            sizes, depths = zip(*map(_measure, operand[1]), strict=True)
            size, inside = sum(sizes), max(depths)
        states, depth = states + size, max(depth, inside)
    return states, depth


def prepare_schema(source: str) -> str:
    """The schema as the compiler takes it."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not JSON: {error}") from error
    _prepare(schema, "#", MOST_DEPTH)
    check_states(_schema_states(schema), "the JSON schema")
    for path, part in _walk(schema, "#"):  # a reference that leads nowhere would leave its place without any rule
        if isinstance(reference := part.get("$ref"), str) and not _resolves(reference, schema):
            raise RequestError(f"JSON schema, {path}: `$ref` names `{reference}`, which is not in the schema")
    return json.dumps(schema)


def _schema_states(schema: Any) -> int:
    """States of the grammar it becomes: what may repeat counts as often as it may."""
    if isinstance(schema, bool):
        return 1
    size = 1 + len(schema.get("enum", ())) + (count_states(schema["pattern"]) if "pattern" in schema else 0)
    for key, _, part in _subschemas(schema, ""):
        bounds = REPEAT_BOUNDS.get(key, ())
        size += _schema_states(part) * max(1, *(schema[bound] for bound in bounds if type(schema.get(bound)) is int), 1)
    return size


def is_quick_schema(schema: str) -> bool:
    """Whether a prepared schema is sure to be compiled in seconds."""
    root = json.loads(schema)
    patterns = [part["pattern"] for _, part in _walk(root, "#") if "pattern" in part]
    return _schema_states(root) <= QUICK_STATES and all(map(is_quick_pattern, patterns))


def _resolves(reference: str, root: Any) -> bool:
    """Whether a reference such as `#/$defs/item` finds a schema."""
    first, *steps = reference.split("/")
    found = root
    for step in steps:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            return False
    return first == "#" and isinstance(found, dict | bool)


def _prepare(schema: Any, path: str, depth: int) -> None:
    """Check a schema and those inside it, and rewrite them in place."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise RequestError(f"JSON schema, {path}: a schema is an object, not {json.dumps(schema)[:40]}")
    if not depth:
        raise RequestError(f"the JSON schema is nested deeper than {MOST_DEPTH}")
    _check_keywords(schema, path)
    if "pattern" in schema:
        _check_pattern(schema, path)
    for _, child_path, part in _subschemas(schema, path):
        _prepare(part, child_path, depth - 1)
    schema.pop("uniqueItems", None)
    if "minLength" in schema or "maxLength" in schema:
        # The compiler's own lengths let control characters into strings, which JSON forbids; its patterns do not.
        schema["pattern"] = f"^.{{{schema.pop('minLength', 0)},{schema.pop('maxLength', '')}}}$"


def _subschemas(schema: dict[str, Any], path: str) -> Iterator[tuple[str, str, Any]]:
    """The schemas inside a schema: keyword, path, schema."""
    for key, value in schema.items():
        here = f"{path}/{key}"
        if key in ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames"):
            yield key, here, value
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            yield from ((key, f"{here}/{number}", part) for number, part in enumerate(value))
        elif key in ("properties", "patternProperties", *DEFINITIONS) and isinstance(value, dict):
            yield from ((key, f"{here}/{name}", part) for name, part in value.items())


def _walk(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all those inside it, with their paths; not those that are a mere `true` or `false`."""
    if isinstance(schema, dict):
        yield path, schema
        for _, child_path, part in _subschemas(schema, path):
            yield from _walk(part, child_path)


def _check_keywords(schema: dict[str, Any], path: str) -> None:
    keys = {key for key in schema if key not in ANNOTATIONS and key not in DEFINITIONS}
    if schema.get("uniqueItems") is False:
        keys.discard("uniqueItems")
    unknown = sorted(keys - SUPPORTED_KEYWORDS - UNNAMED_KEYWORDS - {*EXCLUSIVE_KEYWORDS})
    if unknown:
        raise RequestError(f"JSON schema, {path}: constrained output cannot enforce `{unknown[0]}`")
    leading = next((key for key in EXCLUSIVE_KEYWORDS if key in keys), None)
    if leading and (beside := sorted(keys - {leading, "type"})):
        raise RequestError(f"JSON schema, {path}: constrained output takes `{leading}` alone, not with `{beside[0]}`")
    if len(schema.get("allOf", ())) > 1:
        raise RequestError(f"JSON schema, {path}: constrained output takes one schema under `allOf`: merge them")
    if "properties" in keys and (beside := sorted(keys & UNNAMED_KEYWORDS)):
        raise RequestError(f"JSON schema, {path}: constrained output cannot enforce `{beside[0]}` with `properties`")
    if "multipleOf" in keys and schema.get("type") != "integer":
        raise RequestError(f"JSON schema, {path}: constrained output enforces `multipleOf` for integers only")
    for key in ("minLength", "maxLength"):
        if key in schema and not (type(schema[key]) is int and schema[key] >= 0):
            raise RequestError(f"JSON schema, {path}: `{key}` must be a whole number from 0 on")
    if schema.get("minLength", 0) > schema.get("maxLength", math.inf):
        raise RequestError(f"JSON schema, {path}: `minLength` is larger than `maxLength`")


def _check_pattern(schema: dict[str, Any], path: str) -> None:
    if {"minLength", "maxLength"} & schema.keys():
        raise RequestError(f"JSON schema, {path}: constrained output takes `pattern` or lengths, not both")
    if not isinstance(schema["pattern"], str):
        raise RequestError(f"JSON schema, {path}: `pattern` must be a string")
    try:
        rewrite_pattern(schema["pattern"])
    except RequestError as error:
        raise RequestError(f"JSON schema, {path}/pattern: {error}") from error
