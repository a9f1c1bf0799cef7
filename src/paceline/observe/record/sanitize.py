"""Reads append-only JSON lines while another process writes them.

Converts message values that msgpack cannot encode into values that it can, and that say what they were.
"""

import json
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np


class Lines:
    """The objects of a file, read on from where the last reading ended.

    A last line without its end is not there yet. A file that was replaced or cut (the run went back) is read anew. What
    is no JSON object is left out and counted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._forget()

    def read(self) -> list[dict[str, Any]]:
        """Everything so far; the list is the reader's own."""
        with self._lock:
            self._refresh()
            return list(self._records)

    def problems(self) -> list[str]:
        with self._lock:
            self._refresh()
            if not self._strange:
                return []
            count, first = len(self._strange), self._strange[0]
            many = f"{count} lines are" if count > 1 else "a line is"
            return [f"{self.path.name}: {many} damaged and left out, the first is line {first}"]

    def _forget(self) -> None:
        self._identity: tuple[int, int] | None = None
        self._at = self._number = 0
        self._records: list[dict[str, Any]] = []
        self._strange: list[int] = []

    def _refresh(self) -> None:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._identity or status.st_size < self._at:
                    self._forget()
                    self._identity = status.st_dev, status.st_ino
                file.seek(self._at)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._at += len(line)
                    self._number += 1
                    self._take(line)
        except FileNotFoundError:
            self._forget()

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            self._records.append(record)
        else:
            self._strange.append(self._number)


DEEPEST = 60
"""Levels of nesting that are kept; a reader's own recursion ends not far below a thousand."""
_LARGEST = 2**63


def _hook(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else _told(value)


encoder = msgspec.msgpack.Encoder(enc_hook=_hook)
REFUSED = (TypeError, ValueError, OverflowError, RecursionError)
"""Errors that it raises for a value that must be tamed first."""


def tamed(value: Any, depth: int = DEEPEST) -> Any:
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
            return {_key(key): tamed(item, depth - 1) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [tamed(item, depth - 1) for item in value]
        case np.generic() | np.ndarray():
            return tamed(value.tolist(), depth - 1)
    return clean(_told(value))


def _key(key: Any) -> Any:
    return key if type(key) is int and -_LARGEST <= key < _LARGEST else clean(str(key))


def _told(value: Any) -> str:
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
