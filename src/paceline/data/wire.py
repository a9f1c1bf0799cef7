"""Encodes samples as msgpack with raw array buffers. Never pickle, never a Python list per token.

An array travels as (dtype, shape, bytes). Decoding wraps the buffer without copying, so decoded streams are read-only
views; the trainer copies once, when it packs.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.data.sample import SCALAR_FIELDS, STREAM_DTYPES, Ended, Sample, Ticket

WIRE_VERSION = 1


class WireError(ValueError):
    """Bytes that are not a batch of samples."""


class WiredArray(msgspec.Struct, array_like=True):
    """An array as (dtype, shape, bytes)."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def of(cls, array: NDArray) -> "WiredArray":
        return cls(array.dtype.str, array.shape, array.data.cast("B") if array.size else memoryview(b""))

    def view(self) -> NDArray:
        return np.frombuffer(self.data, dtype=np.dtype(self.dtype)).reshape(self.shape)


class WiredSample(msgspec.Struct, array_like=True):
    """A sample as the wire has it."""

    streams: dict[str, WiredArray]
    ended: Ended
    env: str
    ticket: tuple[int, str, int, int, int] | None
    rollout: int
    spans: tuple[tuple[int, int], ...]


class _Batch(msgspec.Struct, array_like=True):
    version: int
    samples: list[WiredSample]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Batch)


def encode(samples: Sequence[Sample]) -> bytes:
    """A batch as bytes."""
    return _encoder.encode(_Batch(WIRE_VERSION, [wire(sample) for sample in samples]))


def decode(data: bytes | memoryview) -> list[Sample]:
    """The batch again; streams are views into `data`. Garbage raises `WireError`."""
    try:
        batch = _decoder.decode(data)
        if batch.version != WIRE_VERSION:
            raise WireError(f"a batch of wire version {batch.version} cannot be read by version {WIRE_VERSION}")
        return [unwire(wired) for wired in batch.samples]
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:
        raise WireError(f"not a batch of samples: {error}") from error


def wire(sample: Sample) -> WiredSample:
    """A sample ready for the wire, without a copy of its streams."""
    return WiredSample(
        {name: WiredArray.of(stream) for name, stream in sample.streams().items()},
        *(getattr(sample, name) for name in SCALAR_FIELDS),
    )


def unwire(wired: WiredSample) -> Sample:
    """The sample again; whatever cannot be one raises `ValueError` or `TypeError`."""
    unknown = wired.streams.keys() - STREAM_DTYPES.keys()
    if unknown:
        raise WireError(f"unknown streams {sorted(unknown)}")
    for name, array in wired.streams.items():
        # Strings are compared, not dtypes: numpy evaluates parts of a dtype string, and this one came from outside.
        if array.dtype != (expected := np.dtype(STREAM_DTYPES[name]).str):
            raise WireError(f"stream `{name}` has dtype {array.dtype}, not {expected}")
    return Sample(
        **{name: array.view() for name, array in wired.streams.items()},
        ended=wired.ended,
        env=wired.env,
        ticket=None if wired.ticket is None else Ticket(*wired.ticket),
        rollout=wired.rollout,
        spans=wired.spans,
    )
