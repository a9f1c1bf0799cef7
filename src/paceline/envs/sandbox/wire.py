"""Encodes Python values as JSON: plain data by value, all else as a reference that stays on its side.

What is decoded is built from Python's own types, whatever it was made from. An object that claims to equal everything
arrives as a reference that equals nothing, and a subclass of `int` as an `int`.
"""

from collections import deque
from collections.abc import Callable, ItemsView, KeysView, ValuesView
from typing import Any

MAX_SAFE_INT = 1 << 53
"""Larger integers travel as text: Python refuses to read very long ones from JSON."""
LIST_TYPES = (list, range, deque, KeysView, ValuesView, ItemsView)
COLLECTION_TYPES = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, refer: Callable[[Any], int]) -> Any:
    """A value for JSON. `refer` keeps what is no plain data and gives it a number. Iterators are read to their end."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return int(value) if -MAX_SAFE_INT < value < MAX_SAFE_INT else {"int": hex(value)}
    if isinstance(value, LIST_TYPES) or hasattr(value, "__next__"):
        return [encode(item, refer) for item in value]
    for name, kind in COLLECTION_TYPES.items():
        if isinstance(value, kind):
            return {name: [encode(item, refer) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, refer), encode(item, refer)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return {"ref": refer(value)}


def decode(data: Any, deref: Callable[[int], Any]) -> Any:
    """The value again. `deref` finds what a number stands for."""
    if isinstance(data, list):
        return [decode(item, deref) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, inside),) = data.items()
    match name:
        case "tuple" | "set" | "frozenset":
            return COLLECTION_TYPES[name](decode(item, deref) for item in inside)
        case "dict":
            return {decode(key, deref): decode(item, deref) for key, item in inside}
        case "int":
            return int(inside, 16)
        case "bytes":
            return bytes.fromhex(inside)
        case "complex":
            return complex(*inside)
        case "ref":
            return deref(inside)
    raise ValueError(f"`{name}` is no kind of value")
