"""Fingerprints on CUDA: one launch over all tensors of an update, at memory speed."""

from collections.abc import Sequence

import torch
import triton  # comes with torch's CUDA builds
import triton.language as tl
from torch import Tensor

BLOCK = 4096
SPAN = 16
"""Blocks one program works through."""


@triton.jit
def mix_triton(x):  # noqa: ANN201 - Triton code has no types
    """splitmix64's finaliser, as in `update.mix_tensor`."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _sum_kernel(tensors, work, out, BITS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """tensors: [n, 4] address, elements, columns, row stride; work: [programs, 2] tensor, first element."""
    place = tl.load(work + tl.program_id(0) * 2)
    first = tl.load(work + tl.program_id(0) * 2 + 1)
    base = tl.load(tensors + place * 4)
    size = tl.load(tensors + place * 4 + 1)
    columns = tl.load(tensors + place * 4 + 2)
    stride = tl.load(tensors + place * 4 + 3)
    if BITS == 8:
        bits = base.to(tl.pointer_type(tl.uint8))
    elif BITS == 16:
        bits = base.to(tl.pointer_type(tl.int16))
    elif BITS == 32:
        bits = base.to(tl.pointer_type(tl.int32))
    else:
        bits = base.to(tl.pointer_type(tl.int64))
    total = tl.zeros([BLOCK], tl.uint64)
    for step in range(SPAN):
        index = first + step * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(bits + index // columns * stride + index % columns, index < size, 0)
        total += value.to(tl.int64).to(tl.uint64, bitcast=True) * mix_triton(index.to(tl.uint64, bitcast=True))
    tl.atomic_add(out + place, tl.sum(total, 0).to(tl.int64, bitcast=True))


def tensor_sums(tensors: Sequence[Tensor]) -> list[int]:
    """`update.tensor_sums` on CUDA, with one wait for all."""
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    for width in {tensor.element_size() for tensor in tensors}:
        places = [i for i, tensor in enumerate(tensors) if tensor.element_size() == width]
        part = _launch_sums([tensors[i] for i in places], width)
        sums[torch.tensor(places, device=sums.device)] = part
    return sums.tolist()


def _launch_sums(tensors: list[Tensor], width: int) -> Tensor:
    rows = [_describe(tensor) for tensor in tensors]
    described = torch.tensor([row[1:] for row in rows])
    counts = torch.tensor([-(-row[2] // (BLOCK * SPAN)) for row in rows])
    place = torch.arange(len(rows)).repeat_interleave(counts)
    first = (torch.arange(len(place)) - (counts.cumsum(0) - counts).repeat_interleave(counts)) * BLOCK * SPAN
    device = tensors[0].device
    out = torch.zeros(len(rows), dtype=torch.int64, device=device)
    work = torch.stack([place, first], 1).to(device)
    _sum_kernel[(len(place),)](described.to(device), work, out, BITS=8 * width, BLOCK=BLOCK, SPAN=SPAN, num_warps=8)
    return out


def _describe(tensor: Tensor) -> tuple[Tensor, int, int, int, int]:
    """The tensor (kept alive), its address, elements, columns and row stride."""
    if tensor.ndim == 2 and tensor.stride(1) == 1 and tensor.numel():
        return tensor, tensor.data_ptr(), tensor.numel(), tensor.shape[1], tensor.stride(0)
    flat = tensor.detach().contiguous()
    return flat, flat.data_ptr(), flat.numel(), max(1, flat.numel()), 0
