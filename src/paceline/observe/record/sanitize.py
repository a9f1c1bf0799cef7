"""Converts message values that msgpack cannot encode into values that it can, and that say what they were."""

from typing import Any

import msgspec
import numpy as np

DEEPEST = 60
"""Levels of nesting that are kept; a reader's own recursion ends not far below a thousand."""
_LARGEST = 2**63


def _hook(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else _text(value)


encoder = msgspec.msgpack.Encoder(enc_hook=_hook)
REFUSED = (TypeError, ValueError, OverflowError, RecursionError)
"""Errors that it raises for a value that must be sanitized first."""


def sanitize(value: Any, depth: int = DEEPEST) -> Any:
    """A copy that can be written: lone surrogates as their escapes, huge numbers and what lies too deep as text."""
    match value:
        case None | bool() | float() | bytes():
            return value
        case str():
            return clean(value)
        case int():
            return value if -_LARGEST <= value < _LARGEST else str(value)
    if depth == 0:
        return f"({type(value).__name__}, nested too deep to be kept)"
    match value:
        case dict():
            return {_key(key): sanitize(item, depth - 1) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [sanitize(item, depth - 1) for item in value]
        case np.generic() | np.ndarray():
            return sanitize(value.tolist(), depth - 1)
    return clean(_text(value))


def _key(key: Any) -> Any:
    return key if type(key) is int and -_LARGEST <= key < _LARGEST else clean(str(key))


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # whatever a user's own object does when it is asked for its text
        return f"({type(value).__name__} that does not tell what it is: {type(error).__name__})"


def clean(text: str) -> str:
    """Text that UTF-8 can hold."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
