"""Packs the arrays of a rollout's body into few bytes.

A stream is kept as its bytes, or as runs of equal values where that is much shorter: most streams of a sample say the
same of thousands of tokens in a row.
"""

import struct
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_INT = struct.Struct("i")
SHORT = 16
"""Tokens up to which `compress_stream` does not look for runs."""

Runs = tuple[bytes, bytes]
"""The value of each run, and where it ends; without ends, the one value of all that was said."""
Spans = Sequence[tuple[int, int]]


class PackedTurn(NamedTuple):
    """The numbers of a turn, four bytes each, as the assembly of its sample needed them anyway: their lists hold an
    object a number all over the memory, and to read those a second time would cost more than all other writing."""

    tokens: bytes
    """Of the sample it is part of: its prompt, what it said, and what came later."""
    start: int
    """Tokens of its prompt."""
    end: int
    """Tokens with what was sampled."""
    logprobs: bytes
    versions: int | bytes
    """One for all, or one for each."""
    made: tuple[NDArray, NDArray, NDArray]
    """Token ids, log probabilities and temperatures of the sample. They are read-only: a sample that has them
    still has what was sampled."""


def pack_ids(values: Sequence[int]) -> bytes:
    """Token ids, four bytes each; raises `OverflowError` where they need more."""
    return _pack("i", values)


def pack_floats(values: Sequence[float]) -> bytes:
    return _pack("f", values)


def all_equal(versions: Sequence[int]) -> bool:
    """Whether one version sampled all tokens, as nearly always."""
    return bool(versions) and versions.count(versions[0]) == len(versions)


def pack_versions(versions: Sequence[int]) -> int | bytes:
    """The version of all tokens, or that of each. Raises as `pack_ids` does."""
    if all_equal(versions):
        try:
            _INT.pack(versions[0])
            return versions[0]
        except struct.error:
            return pack_ids(versions)
    return pack_ids(versions)


def expand_versions(versions: int | bytes, count: int) -> bytes:
    """The version of each of so many tokens."""
    return versions if isinstance(versions, bytes) else _INT.pack(versions) * count


def _pack(kind: str, values: Sequence[float]) -> bytes:
    try:
        return struct.Struct(f"{len(values)}{kind}").pack(*values)
    except struct.error:  # an array takes twice as long, but tells what is wrong
        return array(kind, values).tobytes()


def compress_stream(stream: NDArray, spans: Spans = ()) -> bytes | Runs:
    """Bitwise: two NaNs of different bits are different values, and come back as they were. Credit is mostly one value
    for all that was said and zero elsewhere: that is kept as the value alone."""
    length, data = len(stream), stream.tobytes()
    if spans and stream.itemsize == 4:
        value = data[4 * spans[0][0] : 4 * spans[0][0] + 4]
        if len(value) == 4 and fill_spans(value, length, spans) == data:
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


def decompress_stream(kept: bytes | Runs, dtype: np.dtype[Any], length: int, spans: Spans) -> NDArray:
    """The stream again."""
    if isinstance(kept, bytes):
        return np.frombuffer(kept, dtype)
    if not kept[1]:
        return np.frombuffer(fill_spans(kept[0], length, spans), dtype)
    values, ends = np.frombuffer(kept[0], dtype), np.frombuffer(kept[1], "<u4")
    return np.repeat(values, np.diff(ends, prepend=0))


def fill_spans(value: bytes, length: int, spans: Spans) -> bytes:
    """Four bytes in each place of the spans, and zero elsewhere."""
    if len(spans) == 1:
        start, end = spans[0]
        return bytes(4 * start) + value * (end - start) + bytes(4 * (length - end)) if end <= length else b""
    place, parts = 0, []
    for start, end in spans:
        parts += bytes(4 * (start - place)), value * (end - start)
        place = end
    return b"".join([*parts, bytes(4 * (length - place))]) if place <= length else b""
