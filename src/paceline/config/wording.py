"""Describes in plain words what a key expects and what it was given."""

import json
import math
import tomllib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen

from paceline.config.fields import Spot, is_union

ONE = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a table"}
MANY = {int: "whole numbers", float: "numbers", str: "text"}


def expected(spot: Spot) -> str:
    kind = spot.annotation
    if get_origin(kind) is Literal:
        values = [given(value) for value in get_args(kind)]
        return f"one of {either(values)}" if len(values) > 1 else values[0]
    if spot.sections:
        return "a table"
    if is_union(kind):
        return " or ".join(expected(Spot.of(option)) for option in get_args(kind))
    if spot.is_list:
        return _list(spot)
    noun = ONE.get(get_origin(kind) or kind, "another value")
    bounds = " and ".join(filter(None, map(_bound, spot.constraints)))
    return f"{noun}, {bounds}" if bounds else noun


def given(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    if value is None:
        return "nothing"
    # JSON writes inf and nan in its own way; everything else here reads as it would in the file.
    text = str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def advice(spot: Spot, value: Any) -> str:
    """A hint on what to write instead, where that can be guessed; else empty."""
    kind = spot.annotation
    if spot.is_list and isinstance(value, dict):
        return "; write the header in double brackets, such as [[env]]"
    if spot.is_list and isinstance(value, str):
        return f"; write [{given(value)}]"
    if get_origin(kind) is Literal:
        nearest = get_close_matches(str(value), map(str, get_args(kind)), n=1)
        return f"; did you mean {given(nearest[0])}?" if nearest else ""
    if isinstance(value, float) and not math.isfinite(value):
        return "; it must be finite"
    if kind is int and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if kind in (int, float, bool) and isinstance(value, str) and _fits(kind, value):
        return f"; write {value.lower()}, without quotes"
    return ""


def either(words: Iterable[str], last: str = "or") -> str:
    """`a, b or c`."""
    words = list(words)
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def code(words: Iterable[object]) -> Sequence[str]:
    return [f"`{word}`" for word in words]


def toml_value(text: str) -> Any:
    """The TOML value a text spells, or the text itself."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text


def _fits(kind: type, text: str) -> bool:
    value = toml_value(text.lower())
    return isinstance(value, bool) if kind is bool else type(value) in (int, kind)


def _list(spot: Spot) -> str:
    kinds = get_args(spot.annotation)
    element = Spot.of(kinds[0])
    if get_origin(element.annotation) is Literal:
        return f"a list with any of {either(given(value) for value in get_args(element.annotation))}"
    many = "tables" if element.sections else MANY.get(element.annotation, "values")
    if get_origin(spot.annotation) is tuple:
        return f"a list of {len(kinds)} {many}"
    least = next((note.min_length for note in spot.constraints if isinstance(note, MinLen)), 0)
    return f"a list of {many}, at least {least}" if least else f"a list of {many}"


def _bound(note: Any) -> str | None:
    match note:
        case Ge(ge):
            return f"at least {ge}"
        case Gt(gt):
            return f"above {gt}"
        case Le(le):
            return f"at most {le}"
        case Lt(lt):
            return f"below {lt}"
    return None
