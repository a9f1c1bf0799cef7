"""What was read of `tickets.jsonl`, kept beside it: reading a million tickets takes seconds, but once only.

It is nobody's truth. It counts while the journal begins with the bytes it was made of, here or in a copy. Otherwise,
or where it is damaged, the journal is read anew. Where nothing can be written, what was read stays in memory alone.
"""

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.monitor.files import replace_file
from paceline.record.journal import LINE, NAMED

SCHEMA = 1
_BLOCK = 1 << 20


class Head(msgspec.Struct, frozen=True):
    """How far the journal was read, and what the lines leave out."""

    at: int
    """Bytes that were read; the next line begins there."""
    digest: str
    """Their fingerprint."""
    count: int
    """Lines that were read, those that are no ticket's among them."""
    strange: int
    first: int
    """The number of the first that is no ticket's, counted from 1; 0 where there is none."""
    names: list[str]
    schema: int = SCHEMA


_decoder = msgspec.json.Decoder(Head)


def digest(journal: int, at: int) -> str:
    """A fingerprint of what stands before a place in a file; a tenth of the time that reading it as JSON takes."""
    found = hashlib.sha256()
    for start in range(0, at, _BLOCK):
        found.update(os.pread(journal, min(_BLOCK, at - start), start))
    return found.hexdigest()


def load(path: Path, journal: int) -> tuple[Head, NDArray[Any]] | None:
    """The index, if it is of this open journal; None where it is not, or where there is none."""
    try:
        with path.open("rb") as file:
            head = _decoder.decode(file.readline())
            lines = np.frombuffer(file.read(), LINE)
    except (OSError, ValueError, msgspec.DecodeError):
        return None
    same = head.schema == SCHEMA and 0 <= head.at <= os.fstat(journal).st_size
    whole = len(lines) == head.count - head.strange and all(
        lines[column].max(initial=0) < len(head.names) for column in NAMED
    )
    return (head, lines) if same and whole and digest(journal, head.at) == head.digest else None


def save(path: Path, head: Head, lines: NDArray[Any]) -> None:
    """Keep it, where the folder lets us."""
    with contextlib.suppress(OSError):
        replace_file(path, [msgspec.json.encode(head), b"\n", lines.tobytes()], durable=False)
