"""Packs ascending positions into few bytes, and unpacks them, on the device where they lie.

gaps     the distance to the one before, 7 bits a byte, the highest bit set where more follow: one byte a position
         where neighbours are less than 128 apart
blocks   which blocks of 256 hold any (again as gaps), and a bitmap of 32 bytes for each: shorter from about one
         element in eight on, or where positions cluster, as in the rows of an embedding
"""

import torch
from torch import Tensor

from paceline.errors import PacelineError

BLOCK = 256
BITMAP = BLOCK // 8
LONGEST = 6
"""Bytes of one gap: tensors of up to 2^42 elements."""


class PositionError(PacelineError):
    """Bytes that are no positions."""


def pack(positions: Tensor) -> tuple[str, Tensor]:
    """The shorter form and its bytes; there must be at least one position."""
    gaps = _gaps(positions)
    as_gaps = int(_lengths(gaps).sum())
    blocks = positions >> 8
    touched = int((blocks[1:] != blocks[:-1]).sum()) + 1
    # A touched block costs its bitmap and at least one byte of gap.
    if touched * (BITMAP + 1) >= as_gaps:
        return "gaps", _varints(gaps)
    some, place = torch.unique_consecutive(blocks, return_inverse=True)
    head = _varints(_gaps(some))
    if len(head) + touched * BITMAP >= as_gaps:
        return "gaps", _varints(gaps)
    marks = torch.zeros(touched * BLOCK, dtype=torch.uint8, device=positions.device)
    marks[place * BLOCK + (positions & (BLOCK - 1))] = 1
    return "blocks", torch.cat([head, (marks.view(-1, 8) * _powers(marks)).sum(1, dtype=torch.uint8)])


def unpack(form: str, data: Tensor, count: int, size: int) -> Tensor:
    """`count` ascending positions below `size`."""
    if form == "gaps":
        positions = _positions(_numbers(data), size)
    elif form == "blocks":
        positions = _from_blocks(data, size)
    else:
        raise PositionError(f"there is no form `{form}`")
    if len(positions) != count:
        raise PositionError(f"{len(positions)} positions where {count} were announced")
    return positions


def _from_blocks(data: Tensor, size: int) -> Tensor:
    """The bitmaps come last, and there are as many as gaps: how many follows from where the gaps end."""
    # n gaps take e[n] bytes, e being where the n-th ends; the one n for which e[n] + 32 n is all of it.
    ends = (data < 128).nonzero().view(-1) + 1
    numbers = torch.arange(1, len(ends) + 1, device=data.device)
    (found,) = ((ends + BITMAP * numbers) == len(data)).nonzero(as_tuple=True)
    if len(found) != 1:
        raise PositionError("its bitmaps are not whole")
    touched = int(found[0]) + 1
    cut = len(data) - BITMAP * touched
    blocks = _positions(_numbers(data[:cut]), -(-size // BLOCK))
    bitmaps = data[cut:].view(touched, BITMAP, 1)
    marks = (bitmaps & _powers(data)).ne(0).view(touched, BLOCK)
    if not bool(marks.any(1).all()):
        raise PositionError("a block is empty")
    row, column = marks.nonzero(as_tuple=True)
    positions = blocks[row] * BLOCK + column
    if int(positions[-1]) >= size:
        raise PositionError(f"position {int(positions[-1])} in a tensor of {size}")
    return positions


def _gaps(positions: Tensor) -> Tensor:
    return torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1


def _positions(gaps: Tensor, size: int) -> Tensor:
    # As floating point first: bytes may say anything, and a sum of integers that overflows looks innocent.
    if float(gaps.double().sum()) + len(gaps) > size:
        raise PositionError(f"they lie outside of the tensor's {size} elements")
    return (gaps + 1).cumsum(0) - 1


def _lengths(numbers: Tensor) -> Tensor:
    lengths = torch.ones_like(numbers, dtype=torch.uint8)
    for more in range(1, LONGEST):
        lengths += numbers >= 1 << (7 * more)
    return lengths


def _varints(numbers: Tensor) -> Tensor:
    lengths = _lengths(numbers)
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


def _numbers(data: Tensor) -> Tensor:
    last = data < 128
    if not len(data) or not bool(last[-1]):
        raise PositionError("they end in the middle of a number")
    if bool(last.all()):
        return data.long()
    which = last.long().cumsum(0) - last.long()
    (ends,) = last.nonzero(as_tuple=True)
    starts = torch.cat([ends.new_zeros(1), ends[:-1] + 1])
    place = torch.arange(len(data), device=data.device) - starts[which]
    if int(place.max()) >= LONGEST:
        raise PositionError(f"a number has more than {LONGEST} bytes")
    return torch.zeros_like(ends).scatter_add_(0, which, (data & 127).long() << (7 * place))


def _powers(like: Tensor) -> Tensor:
    return 1 << torch.arange(8, dtype=torch.uint8, device=like.device)
