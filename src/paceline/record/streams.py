"""Arrays in a body, no larger than they need to be.

A stream is kept as its bytes, or as runs of equal values where that is much shorter: most streams of a sample say the
same of thousands of tokens in a row.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHORT = 16
"""Tokens up to which nobody looks for runs."""

Runs = tuple[bytes, bytes]
"""The value of each run, and where it ends; without ends, the one value of all that was said."""
Spans = Sequence[tuple[int, int]]


def ids(values: Sequence[int]) -> bytes:
    """Token ids and versions, four bytes each; raises `OverflowError` where they need more."""
    return array("i", values).tobytes()


def floats(values: Sequence[float]) -> bytes:
    return array("f", values).tobytes()


def read_ids(data: bytes) -> NDArray:
    return np.frombuffer(data, "<i4")


def read_floats(data: bytes) -> NDArray:
    return np.frombuffer(data, "<f4")


def squeeze(stream: NDArray, spans: Spans = ()) -> bytes | Runs:
    """Bitwise: two NaNs of different bits are different values, and come back as they were. Credit is mostly one value
    for all that was said and zero elsewhere: that is kept as the value alone."""
    length, data = len(stream), stream.tobytes()
    if spans and stream.itemsize == 4:
        value = data[4 * spans[0][0] : 4 * spans[0][0] + 4]
        if len(value) == 4 and spread(value, length, spans) == data:
            return value, b""
    if length <= SHORT:
        return data
    bits = stream.view(f"u{stream.itemsize}")
    changes = (bits[1:] != bits[:-1]).nonzero()[0]
    if 4 * len(changes) >= length:
        return data
    ends = np.empty(len(changes) + 1, "<u4")
    ends[:-1] = changes
    ends[-1] = length - 1
    return stream[ends].tobytes(), (ends + 1).tobytes()


def unfold(kept: bytes | Runs, dtype: np.dtype[Any], length: int, spans: Spans) -> NDArray:
    """The stream again."""
    if isinstance(kept, bytes):
        return np.frombuffer(kept, dtype)
    if not kept[1]:
        return np.frombuffer(spread(kept[0], length, spans), dtype)
    values, ends = np.frombuffer(kept[0], dtype), np.frombuffer(kept[1], "<u4")
    return np.repeat(values, np.diff(ends, prepend=0))


def spread(value: bytes, length: int, spans: Spans) -> bytes:
    """Four bytes in each place of the spans, and zero elsewhere."""
    place, parts = 0, []
    for start, end in spans:
        parts += bytes(4 * (start - place)), value * (end - start)
        place = end
    return b"".join([*parts, bytes(4 * (length - place))]) if place <= length else b""
