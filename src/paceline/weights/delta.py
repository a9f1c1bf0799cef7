"""Encodes the elements that changed between two versions of the weights, and their new bits.

At the learning rates of RL an optimizer step moves few of the published bfloat16 numbers: most steps are smaller than
half the distance to the next number, and stay in the trainer's float32 masters. A delta holds the others. On the wire:

    magic 8 | header's length 8 | digest 16 | header, JSON | for each changed tensor: positions, then new bits, raw

Positions are coded in whichever of two ways is shorter for the tensor (`indices.py`). The header names the version and
the fingerprint it builds on and those it leads to; fingerprints add up over elements, so both sides know the new one
from the changed elements alone.
"""

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.weights.bits import MASK
from paceline.weights.indices import PositionError, pack, unpack
from paceline.weights.torch_bits import WIDTHS, bits_of, mix
from paceline.weights.update import ServedPolicy, fingerprint, salt

MAGIC = b"PLDELTA1"
HEAD = struct.Struct("<8sQ16s")
MOST_SHARE = 0.5
"""Of a full update's bytes: a delta that would be larger is not worth its trouble."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}


class DeltaError(PacelineError):
    """A delta that cannot be read, or does not fit what it is applied to."""


@dataclass(frozen=True, slots=True)
class Change:
    """The elements of one tensor that are not as they were."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    positions: Tensor
    """Into the flat tensor, ascending."""
    bits: Tensor
    """The new values there, as integers of the same width."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in the header, and where its part of the payload lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    form: str
    count: int
    index_bytes: int
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        return self.start + self.index_bytes + self.count * self.dtype.itemsize


class WeightDelta:
    """From `base` to `result`. Made by `LastSent`, or read from bytes, which are not trusted."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        header, self._payload = _checked(data)
        try:
            self.base, self.result = _policy(header["base"]), _policy(header["result"])
            self.entries = _entries(header["tensors"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DeltaError(f"the delta's header makes no sense ({type(error).__name__}: {error})") from error
        if (end := max((entry.end for entry in self.entries.values()), default=0)) != len(self._payload):
            raise DeltaError(f"the delta is not whole: {len(self._payload)} bytes where its header announces {end}")
        self._changes: dict[torch.device, dict[str, Change]] = {}

    def __len__(self) -> int:
        """Bytes on the wire."""
        return len(self.data)

    def changes(self, device: torch.device | str = "cpu") -> dict[str, Change]:
        """The changed elements by tensor, on this device; unchanged tensors are left out."""
        device = torch.device(device)
        if device not in self._changes:
            payload = torch.from_numpy(np.frombuffer(self._payload, np.uint8).copy()).to(device)
            entries = ((name, entry) for name, entry in self.entries.items() if entry.count)
            self._changes[device] = {name: _change(name, entry, payload) for name, entry in entries}
        return self._changes[device]

    def check_fit(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors of other names or forms than the delta's."""
        if unknown := self.entries.keys() - tensors.keys():
            raise DeltaError(f"the delta names tensors this model does not have: {sorted(unknown)[:3]}")
        for name, entry in self.entries.items():
            mine = tensors[name]
            if mine.dtype != entry.dtype or tuple(mine.shape) != entry.shape:
                raise DeltaError(f"`{name}` is {entry.dtype} {list(entry.shape)} in the delta, but not in the model")

    def moved(self, tensors: Mapping[str, Tensor]) -> str:
        """The fingerprint these tensors, which have the base's, will have; nothing is changed yet."""
        total = int(self.base.fingerprint, 16)
        for name, change in self.changes(_device(tensors)).items():
            old = bits_of(tensors[name])[change.positions]
            total += _shift(name, change.positions, old, change.bits)
        return f"{total & MASK:016x}"

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Change the tensors in place."""
        for name, change in self.changes(_device(tensors)).items():
            tensor = tensors[name].detach()
            bits = bits_of(tensor)
            bits[change.positions] = change.bits
            if not tensor.is_contiguous():
                tensor.copy_(bits.view(tensor.dtype).view(tensor.shape))

    def forget(self) -> None:
        """Let go of what was unpacked for a device; it is unpacked again where it is needed."""
        self._changes.clear()

    def patched(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """New tensors, from ones that must be the base's; both ends are proved by their whole fingerprint."""
        self.check_fit(tensors)
        if (held := fingerprint((name, tensors[name]) for name in self.entries)) != self.base.fingerprint:
            raise DeltaError(f"the delta builds on weights {self.base.fingerprint}, and these are {held}")
        new = {name: tensors[name].detach().clone() for name in self.entries}
        self.write(new)
        if (got := fingerprint(new.items())) != self.result.fingerprint:
            raise DeltaError(f"the delta leads to weights {got}, not to {self.result.fingerprint} as it says")
        return new


class LastSent:
    """A copy of what was published last, where the tensors lie, and the way from there to the next."""

    def __init__(self, share: float = MOST_SHARE) -> None:
        self.policy: ServedPolicy | None = None
        self._share = share
        self._copy: dict[str, Tensor] = {}

    def advance(self, version: int, tensors: Mapping[str, Tensor]) -> WeightDelta | None:
        """The delta from the last version to this one; None if there was none, or a full update would be shorter."""
        made = self._encoded(version, tensors) if self._fits(tensors) else None
        if made is None:
            self.policy = ServedPolicy(version, fingerprint(tensors.items()))
            self._keep(tensors)
            return None
        delta = WeightDelta(made)
        self.policy = None  # a write that breaks off leaves nothing to build on
        delta.write(self._copy)
        self.policy = delta.result
        delta.forget()
        return delta

    def _fits(self, tensors: Mapping[str, Tensor]) -> bool:
        return self.policy is not None and _forms(tensors) == _forms(self._copy)

    def _keep(self, tensors: Mapping[str, Tensor]) -> None:
        if _forms(tensors) != _forms(self._copy):
            self._copy = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        elif tensors:
            torch._foreach_copy_(list(self._copy.values()), [tensors[name].detach() for name in self._copy])

    def _encoded(self, version: int, tensors: Mapping[str, Tensor]) -> bytes | None:
        assert self.policy is not None
        room = self._share * sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        total = int(self.policy.fingerprint, 16)
        listed: list[list[Any]] = []
        parts: list[bytes] = []
        for name, tensor in tensors.items():
            old, new = bits_of(self._copy[name]), bits_of(tensor)
            changed = old != new
            count = int(torch.count_nonzero(changed))
            room -= count * tensor.element_size()
            if room < 0:
                return None
            form, index = "gaps", b""
            if count:
                positions = changed.nonzero().view(-1)
                values = new[positions]
                total += _shift(name, positions, old[positions], values)
                form, packed = pack(positions)
                index = _raw(packed)
                parts += [index, _raw(values.view(torch.uint8))]
                room -= len(index)
            kind = str(tensor.dtype).removeprefix("torch.")
            listed.append([name, kind, list(tensor.shape), form, count, len(index)])
        base = [self.policy.version, self.policy.fingerprint]
        head = {"base": base, "result": [version, f"{total & MASK:016x}"], "tensors": listed}
        written = json.dumps(head, separators=(",", ":")).encode()
        if len(written) > room:
            return None
        body = b"".join([written, *parts])
        return HEAD.pack(MAGIC, len(written), _digest(body)) + body


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple]:
    return {name: (t.dtype, t.shape, t.device) for name, t in sorted(tensors.items())}


def _shift(name: str, positions: Tensor, old: Tensor, new: Tensor) -> int:
    """What the change adds to the fingerprint."""
    return int(((new.long() - old.long()) * mix(positions)).sum()) * salt(name)


def _raw(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


def _device(tensors: Mapping[str, Tensor]) -> torch.device:
    return next(iter(tensors.values())).device


def _checked(data: bytes) -> tuple[dict[str, Any], memoryview]:
    """Header and payload of bytes that are as they were sent."""
    if len(data) < HEAD.size or data[:8] != MAGIC:
        raise DeltaError(f"these {len(data)} bytes are no delta of weights")
    _, length, digest = HEAD.unpack_from(data)
    body = memoryview(data)[HEAD.size :]
    if _digest(body) != digest:
        raise DeltaError("the delta is damaged: its digest is not that of its bytes")
    try:
        header = json.loads(bytes(body[:length]))
    except (ValueError, RecursionError) as error:
        raise DeltaError(f"the delta's header is not JSON: {error}") from error
    if length > len(body) or not isinstance(header, dict):
        raise DeltaError("the delta's header is not whole")
    return header, body[length:]


def _policy(given: Any) -> ServedPolicy:
    version, mark = given
    if type(version) is not int or not re.fullmatch("[0-9a-f]{16}", mark):
        raise ValueError(f"{given} is no version with its fingerprint")
    return ServedPolicy(version, mark)


def _entries(listed: list[list[Any]]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    start = 0
    for name, kind, shape, form, count, index_bytes in listed:
        numbers = (count, index_bytes, *shape)
        if not all(type(number) is int and number >= 0 for number in numbers) or name in entries:
            raise ValueError(f"the entry of `{name}`")
        entry = Entry(DTYPES[kind], tuple(shape), form, count, index_bytes, start)
        if count > entry.numel or (not count and index_bytes):
            raise ValueError(f"{count} changes in the {entry.numel} elements of `{name}`")
        entries[name] = entry
        start = entry.end
    if not entries:
        raise ValueError("no tensors")
    return entries


def _change(name: str, entry: Entry, payload: Tensor) -> Change:
    middle = entry.start + entry.index_bytes
    try:
        positions = unpack(entry.form, payload[entry.start : middle], entry.count, entry.numel)
    except PositionError as error:
        raise DeltaError(f"the positions of `{name}` cannot be read: {error}") from error
    raw = payload[middle : entry.end].clone()  # aligned, whatever came before
    return Change(entry.dtype, entry.shape, positions, raw.view(WIDTHS[entry.dtype.itemsize]))
