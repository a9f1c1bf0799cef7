"""Digests of an environment's rows, by which a resumed run notices that its dataset has changed."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from paceline.data.rows import Row, Rows

MOST_ROWS = 20_000
"""Rows that are hashed. Of more, so many at equal distances; the count and the first and last row always are."""
MOST_FOREIGN = 64
"""Of a sequence that is neither a list nor one of Paceline's readers: what one row costs there is unknown."""
DIGEST_BYTES = 16


def row_digest(rows: Sequence[Row]) -> dict[str, Any]:
    """How many rows there are, how many of them were hashed, and their digest in order.

    >>> row_digest([{"a": 1}, {"a": 2}]) == row_digest([{"a": 2}, {"a": 1}])
    False
    """
    most = MOST_ROWS if isinstance(rows, list | tuple | Rows) else MOST_FOREIGN
    total = len(rows)
    hashed = min(total, most)
    digest = blake2b(digest_size=DIGEST_BYTES)
    for place in range(hashed):
        index = place if hashed == total else place * (total - 1) // (hashed - 1)
        digest.update(_bytes(rows[index]))
    return {"rows": total, "hashed": hashed, "blake2b": digest.hexdigest()}


def row_change(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between the rows of a checkpoint and those of now, in a few words; empty if nothing does."""
    if saved["rows"] != now["rows"]:
        return f"it had {saved['rows']} rows and has {now['rows']}"
    if saved["hashed"] == now["hashed"] and saved["blake2b"] != now["blake2b"]:
        return f"its {now['rows']} rows have another order or other content"
    return ""


def _bytes(row: Any) -> bytes:
    """A row as text that is the same in every process; of an object that is no JSON only its type counts."""
    try:
        try:
            text = json.dumps(row, sort_keys=True, default=_plain)
        except TypeError:  # keys of several types have no order
            text = json.dumps(row, skipkeys=True, default=_plain)
    except (ValueError, RecursionError):  # a row inside itself
        text = type(row).__name__
    return text.encode("utf-8", "surrogatepass") + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes | bytearray):
        return blake2b(value, digest_size=DIGEST_BYTES).hexdigest()
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__
