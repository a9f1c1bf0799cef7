"""Encodes the elements that changed between two versions of the weights, and their new bits.

At the learning rates of RL an optimizer step moves few of the published bfloat16 numbers: most steps are smaller than
half the distance to the next number, and stay in the trainer's float32 masters. A delta holds the others. On the wire:

    magic 8 | header's length 8 | digest 16 | header, JSON | for each changed tensor: positions, then new bits, raw

The header names the version and the fingerprint it builds on and those it leads to; fingerprints add up over elements,
so both sides know the new one from the changed elements alone. Positions ascend, and are coded in whichever of two ways
is shorter for the tensor:

gaps     the distance to the one before, 7 bits a byte, the highest bit set where more follow: one byte a position
         where neighbours are less than 128 apart
blocks   which blocks of 256 hold any (again as gaps), and a bitmap of 32 bytes for each: shorter from about one
         element in eight on, or where positions cluster, as in the rows of an embedding
"""

import hashlib
import struct
from collections.abc import Mapping
from math import prod
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from paceline.errors import EngineError
from paceline.weights.update import INTEGERS, MASK, ServedPolicy, bits_of, fingerprint, mix_tensor, salt

MAGIC = b"PLDELTA1"
HEADER = struct.Struct("<8sQ16s")
MOST_SHARE = 0.5
"""Of a full update's bytes: a delta that would be larger is not worth its trouble."""
BLOCK = 256
BITMAP_BYTES = BLOCK // 8
MOST_VARINT_BYTES = 6
"""Bytes of one gap: tensors of up to 2^42 elements."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}


Count = Annotated[int, Meta(ge=0)]
Fingerprint = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]


class DeltaError(EngineError):
    """A delta that cannot be read, or does not fit what it is applied to."""


class TensorChange(NamedTuple):
    """The elements of one tensor that are not as they were."""

    positions: Tensor
    """Into the flat tensor, ascending."""
    bits: Tensor
    """The new values there, as integers of the same width."""


class DeltaEntry(msgspec.Struct, array_like=True, frozen=True):
    """A tensor in the header, and how much of the payload is its own."""

    name: str
    kind: str
    shape: tuple[Count, ...]
    form: str
    count: Count
    index_bytes: Count

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.kind]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.index_bytes + self.count * self.dtype.itemsize


class DeltaHeader(msgspec.Struct):
    """What a delta builds on, what it leads to, each a version and its fingerprint, and all tensors of both."""

    base: tuple[int, Fingerprint]
    result: tuple[int, Fingerprint]
    tensors: Annotated[list[DeltaEntry], Meta(min_length=1)]


class WeightDelta:
    """From `base` to `result`. Made by `DeltaEncoder`, or read from bytes, which are not trusted."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        if len(data) < HEADER.size or data[:8] != MAGIC:
            raise DeltaError(f"these {len(data)} bytes are no delta of weights")
        _, length, digest = HEADER.unpack_from(data)
        body = memoryview(data)[HEADER.size :]
        if _digest(body) != digest:
            raise DeltaError("the delta is damaged: its digest is not that of its bytes")
        try:
            header = msgspec.json.decode(body[:length], type=DeltaHeader)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise DeltaError(f"the delta's header makes no sense: {error}") from error
        self.base, self.result = ServedPolicy(*header.base), ServedPolicy(*header.result)
        self.entries: dict[str, DeltaEntry] = {}
        for entry in header.tensors:
            known = entry.kind in DTYPES and entry.name not in self.entries
            if not known or entry.count > entry.numel or (entry.index_bytes and not entry.count):
                raise DeltaError(f"the delta's header makes no sense: the entry of `{entry.name}`")
            self.entries[entry.name] = entry
        self._payload = body[length:]
        if length + (end := sum(entry.nbytes for entry in header.tensors)) != len(body):
            raise DeltaError(f"the delta is not whole: {len(self._payload)} bytes where its header announces {end}")
        self._changes: dict[torch.device, dict[str, TensorChange]] = {}

    def __len__(self) -> int:
        """Bytes on the wire."""
        return len(self.data)

    def changes(self, device: torch.device | str = "cpu") -> dict[str, TensorChange]:
        """The changed elements by tensor, on this device; unchanged tensors are left out."""
        device = torch.device(device)
        if device not in self._changes:
            payload = torch.from_numpy(np.frombuffer(self._payload, np.uint8).copy()).to(device)
            entries = list(self.entries.values())
            parts = payload.split([entry.nbytes for entry in entries])
            pairs = zip(entries, parts, strict=True)
            self._changes[device] = {entry.name: _decode_change(entry, part) for entry, part in pairs if entry.count}
        return self._changes[device]

    def free_unpacked(self) -> None:
        """Free the decoded changes; they are decoded again when needed."""
        self._changes.clear()

    def check_fit(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors of other names or forms than the delta's."""
        if unknown := self.entries.keys() - tensors.keys():
            raise DeltaError(f"the delta names tensors this model does not have: {sorted(unknown)[:3]}")
        for name, entry in self.entries.items():
            mine = tensors[name]
            if mine.dtype != entry.dtype or tuple(mine.shape) != entry.shape:
                raise DeltaError(f"`{name}` is {entry.dtype} {list(entry.shape)} in the delta, but not in the model")

    def result_fingerprint(self, tensors: Mapping[str, Tensor]) -> str:
        """The fingerprint these tensors will have after `write`; they must hold the base. Changes nothing."""
        total = int(self.base.fingerprint, 16)
        for name, change in self.changes(_device(tensors)).items():
            old = bits_of(tensors[name])[change.positions]
            total += _fingerprint_change(name, change.positions, old, change.bits)
        return f"{total & MASK:016x}"

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Change the tensors in place."""
        for name, change in self.changes(_device(tensors)).items():
            tensor = tensors[name].detach()
            bits = bits_of(tensor)
            bits[change.positions] = change.bits
            if not tensor.is_contiguous():
                tensor.copy_(bits.view(tensor.dtype).view(tensor.shape))


class DeltaEncoder:
    """Keeps a copy of the last published tensors, on their device, and encodes the delta to the next."""

    def __init__(self, share: float = MOST_SHARE) -> None:
        self.policy: ServedPolicy | None = None
        self._share = share
        self._copy: dict[str, Tensor] = {}

    def advance(self, version: int, tensors: Mapping[str, Tensor]) -> WeightDelta | None:
        """The delta from the last version to this one; None if there was none, or a full update would be shorter."""
        alike = _tensor_specs(tensors) == _tensor_specs(self._copy)
        encoded = self._encode(version, tensors) if self.policy is not None and alike else None
        if encoded is None:
            self.policy = ServedPolicy(version, fingerprint(tensors.items()))
            if not alike:
                self._copy = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            elif tensors:
                torch._foreach_copy_(list(self._copy.values()), [tensors[name].detach() for name in self._copy])
            return None
        delta = WeightDelta(encoded)
        self.policy = None  # a write that breaks off leaves nothing to build on
        delta.write(self._copy)
        self.policy = delta.result
        delta.free_unpacked()
        return delta

    def _encode(self, version: int, tensors: Mapping[str, Tensor]) -> bytes | None:
        assert self.policy is not None
        room = self._share * sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        total = int(self.policy.fingerprint, 16)
        entries: list[DeltaEntry] = []
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
                total += _fingerprint_change(name, positions, old[positions], values)
                form, packed = encode_positions(positions)
                index = _raw(packed)
                parts += [index, _raw(values.view(torch.uint8))]
                room -= len(index)
            kind = str(tensor.dtype).removeprefix("torch.")
            entries.append(DeltaEntry(name, kind, tuple(tensor.shape), form, count, len(index)))
        base, result = (self.policy.version, self.policy.fingerprint), (version, f"{total & MASK:016x}")
        written = msgspec.json.encode(DeltaHeader(base, result, entries))
        if len(written) > room:
            return None
        body = b"".join([written, *parts])
        return HEADER.pack(MAGIC, len(written), _digest(body)) + body


def _tensor_specs(tensors: Mapping[str, Tensor]) -> dict[str, tuple]:
    return {name: (t.dtype, t.shape, t.device) for name, t in sorted(tensors.items())}


def _fingerprint_change(name: str, positions: Tensor, old: Tensor, new: Tensor) -> int:
    """What the change adds to the fingerprint."""
    return int(((new.long() - old.long()) * mix_tensor(positions)).sum()) * salt(name)


def _raw(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


def _device(tensors: Mapping[str, Tensor]) -> torch.device:
    return next(iter(tensors.values())).device


def _decode_change(entry: DeltaEntry, part: Tensor) -> TensorChange:
    try:
        positions = decode_positions(entry.form, part[: entry.index_bytes], entry.count, entry.numel)
    except DeltaError as error:
        raise DeltaError(f"the positions of `{entry.name}` cannot be read: {error}") from error
    raw = part[entry.index_bytes :].clone()  # aligned, whatever came before
    return TensorChange(positions, raw.view(getattr(torch, INTEGERS[entry.dtype.itemsize])))


def encode_positions(positions: Tensor) -> tuple[str, Tensor]:
    """The shorter form and its bytes; there must be at least one position."""
    gaps = _to_gaps(positions)
    as_gaps = int(_varint_lengths(gaps).sum())
    blocks = positions >> 8
    touched = int((blocks[1:] != blocks[:-1]).sum()) + 1
    # A touched block costs its bitmap and at least one byte of gap.
    if touched * (BITMAP_BYTES + 1) >= as_gaps:
        return "gaps", _encode_varints(gaps)
    some, place = torch.unique_consecutive(blocks, return_inverse=True)
    head = _encode_varints(_to_gaps(some))
    if len(head) + touched * BITMAP_BYTES >= as_gaps:
        return "gaps", _encode_varints(gaps)
    marks = torch.zeros(touched * BLOCK, dtype=torch.uint8, device=positions.device)
    marks[place * BLOCK + (positions & (BLOCK - 1))] = 1
    return "blocks", torch.cat([head, (marks.view(-1, 8) * _bit_weights(marks)).sum(1, dtype=torch.uint8)])


def decode_positions(form: str, data: Tensor, count: int, size: int) -> Tensor:
    """`count` ascending positions below `size`."""
    if form == "gaps":
        positions = _from_gaps(_decode_varints(data), size)
    elif form == "blocks":
        positions = _decode_blocks(data, size)
    else:
        raise DeltaError(f"there is no form `{form}`")
    if len(positions) != count:
        raise DeltaError(f"{len(positions)} positions where {count} were announced")
    return positions


def _decode_blocks(data: Tensor, size: int) -> Tensor:
    """The bitmaps come last, and there are as many as gaps: how many follows from where the gaps end."""
    # n gaps take e[n] bytes, e being where the n-th ends; the one n for which e[n] + 32 n is all of it.
    ends = (data < 128).nonzero().view(-1) + 1
    numbers = torch.arange(1, len(ends) + 1, device=data.device)
    (found,) = ((ends + BITMAP_BYTES * numbers) == len(data)).nonzero(as_tuple=True)
    if len(found) != 1:
        raise DeltaError("its bitmaps are not whole")
    touched = int(found[0]) + 1
    cut = len(data) - BITMAP_BYTES * touched
    blocks = _from_gaps(_decode_varints(data[:cut]), -(-size // BLOCK))
    bitmaps = data[cut:].view(touched, BITMAP_BYTES, 1)
    marks = (bitmaps & _bit_weights(data)).ne(0).view(touched, BLOCK)
    if not bool(marks.any(1).all()):
        raise DeltaError("a block is empty")
    row, column = marks.nonzero(as_tuple=True)
    positions = blocks[row] * BLOCK + column
    if int(positions[-1]) >= size:
        raise DeltaError(f"position {int(positions[-1])} in a tensor of {size}")
    return positions


def _to_gaps(positions: Tensor) -> Tensor:
    return torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1


def _from_gaps(gaps: Tensor, size: int) -> Tensor:
    # As floating point first: bytes may say anything, and a sum of integers that overflows looks innocent.
    if float(gaps.double().sum()) + len(gaps) > size:
        raise DeltaError(f"they lie outside of the tensor's {size} elements")
    return (gaps + 1).cumsum(0) - 1


def _varint_lengths(numbers: Tensor) -> Tensor:
    lengths = torch.ones_like(numbers, dtype=torch.uint8)
    for more in range(1, MOST_VARINT_BYTES):
        lengths += numbers >= 1 << (7 * more)
    return lengths


def _encode_varints(numbers: Tensor) -> Tensor:
    lengths = _varint_lengths(numbers)
    longest = int(lengths.max())
    if longest == 1:
        return numbers.to(torch.uint8)
    ends = lengths.long().cumsum(0)
    out = torch.zeros(int(ends[-1]), dtype=torch.uint8, device=numbers.device)
    starts = ends - lengths
    for place in range(longest):
        some = lengths > place
        more = (lengths[some] > place + 1).long() << 7
        out[starts[some] + place] = (((numbers[some] >> (7 * place)) & 127) | more).to(torch.uint8)
    return out


def _decode_varints(data: Tensor) -> Tensor:
    last = data < 128
    if not len(data) or not bool(last[-1]):
        raise DeltaError("they end in the middle of a number")
    if bool(last.all()):
        return data.long()
    which = last.long().cumsum(0) - last.long()
    (ends,) = last.nonzero(as_tuple=True)
    starts = torch.cat([ends.new_zeros(1), ends[:-1] + 1])
    place = torch.arange(len(data), device=data.device) - starts[which]
    if int(place.max()) >= MOST_VARINT_BYTES:
        raise DeltaError(f"a number has more than {MOST_VARINT_BYTES} bytes")
    return torch.zeros_like(ends).scatter_add_(0, which, (data & 127).long() << (7 * place))


def _bit_weights(like: Tensor) -> Tensor:
    return 1 << torch.arange(8, dtype=torch.uint8, device=like.device)
