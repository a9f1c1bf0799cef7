"""Attention over a paged KV cache, as Triton kernels.

The cache of one layer is two tensors [pages, kv heads, page, dim]. A table [slots, columns] says which page holds which
tokens of a slot. All lengths and tables are read on the device, so one captured launch serves every step of its size.
"""

import torch
import triton  # comes with torch's CUDA builds
import triton.language as tl
from torch import Tensor

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _store(
    k, v, keys, values, table, slots, positions,
    k_token, k_head, v_token, v_head, columns,
    HEADS: tl.constexpr, HEADS_UP: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One program writes the keys and values of one token to its page."""
    token = tl.program_id(0)
    position = tl.load(positions + token).to(tl.int32)
    page = tl.load(table + tl.load(slots + token) * columns + position // PAGE).to(tl.int64)
    head = tl.arange(0, HEADS_UP)[:, None]
    dim = tl.arange(0, DIM_UP)[None, :]
    inside = (head < HEADS) & (dim < DIM)
    place = ((page * HEADS + head) * PAGE + position % PAGE) * DIM + dim
    tl.store(keys + place, tl.load(k + token * k_token + head * k_head + dim, inside), inside)
    tl.store(values + place, tl.load(v + token * v_token + head * v_head + dim, inside), inside)


@triton.jit
def _decode(
    q, keys, values, table, slots, lengths, out, partial, weights, scale,
    q_token, q_head, columns,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_UP: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One query token per row, against one split of its keys. The heads that share a KV head are the tile's rows."""
    row = tl.program_id(0)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK) * BLOCK
    start = first + split * share
    end = tl.minimum(start + share, length)
    group = tl.arange(0, GROUP_UP)
    dim = tl.arange(0, DIM_UP)
    rows_in = (group[:, None] < GROUP) & (dim[None, :] < DIM)
    head = kv * GROUP + group
    query = tl.load(q + row * q_token + head[:, None] * q_head + dim[None, :], rows_in, 0.0)
    entries = table + tl.load(slots + row) * columns
    most = tl.full([GROUP_UP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_UP], tl.float32)
    acc = tl.zeros([GROUP_UP, DIM_UP], tl.float32)
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        seen = token < end
        page = tl.load(entries + token // PAGE, seen, 0).to(tl.int64)
        place = ((page * (HEADS // GROUP) + kv) * PAGE + token % PAGE) * DIM
        inside = seen[:, None] & (dim[None, :] < DIM)
        key = tl.load(keys + place[:, None] + dim[None, :], inside, 0.0)
        value = tl.load(values + place[:, None] + dim[None, :], inside, 0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E)
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        fade = tl.exp2(most - higher)
        p = tl.exp2(score - higher[:, None])
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        most = higher
    if SPLITS == 1:
        result = acc / tl.maximum(total, 1e-30)[:, None]
        tl.store(out + (row * HEADS + head[:, None]) * DIM + dim[None, :], result.to(out.dtype.element_ty), rows_in)
    else:
        place = (row * HEADS + head) * SPLITS + split
        tl.store(partial + place[:, None] * DIM + dim[None, :], acc, rows_in)
        tl.store(weights + place * 2, most, group < GROUP)
        tl.store(weights + place * 2 + 1, total, group < GROUP)


@triton.jit
def _join(
    partial, weights, out,
    DIM: tl.constexpr, DIM_UP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Add up the splits of one (row, head)."""
    place = tl.program_id(0) * SPLITS + tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM_UP)
    most = tl.load(weights + place * 2)
    total = tl.load(weights + place * 2 + 1)
    highest = tl.maximum(tl.max(most, 0), -1e30)
    fade = tl.exp2(most - highest)
    acc = tl.load(partial + place[:, None] * DIM + dim[None, :], (dim[None, :] < DIM) & (total[:, None] > 0), 0.0)
    result = tl.sum(acc * fade[:, None], 0) / tl.maximum(tl.sum(total * fade, 0), 1e-30)
    tl.store(out + tl.program_id(0) * DIM + dim, result.to(out.dtype.element_ty), dim < DIM)


@triton.jit
def _prefill(
    q, keys, values, table, tiles, chunks, out, scale,
    q_token, q_head, columns,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Some query tokens of one chunk, one head, against the chunk's whole past.

    tiles: [n, 2] chunk (-1: nothing to do) and first query inside it; chunks: [n, 4] first row, tokens, tokens before
    the chunk, slot.
    """
    chunk = tl.load(tiles + tl.program_id(0) * 2).to(tl.int32)
    if chunk < 0:
        return
    begin = tl.load(tiles + tl.program_id(0) * 2 + 1).to(tl.int32)
    head = tl.program_id(1)
    first_row = tl.load(chunks + chunk * 4).to(tl.int32)
    count = tl.load(chunks + chunk * 4 + 1).to(tl.int32)
    before = tl.load(chunks + chunk * 4 + 2).to(tl.int32)
    entries = table + tl.load(chunks + chunk * 4 + 3) * columns
    inner = begin + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_UP)
    rows_in = (inner[:, None] < count) & (dim[None, :] < DIM)
    row = first_row + inner
    query = tl.load(q + row[:, None] * q_token + head * q_head + dim[None, :], rows_in, 0.0)
    position = before + inner
    end = before + tl.minimum(begin + ROWS, count)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(before + begin - WINDOW + 1, 0) // BLOCK * BLOCK
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_UP], tl.float32)
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        page = tl.load(entries + token // PAGE, token < end, 0).to(tl.int64)
        place = ((page * (HEADS // GROUP) + head // GROUP) * PAGE + token % PAGE) * DIM
        inside = (token < end)[:, None] & (dim[None, :] < DIM)
        key = tl.load(keys + place[:, None] + dim[None, :], inside, 0.0)
        value = tl.load(values + place[:, None] + dim[None, :], inside, 0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E)
        seen = token[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (position[:, None] - token[None, :] < WINDOW)
        score = tl.where(seen, score, float("-inf"))
        # Never minus infinity, so that a row which sees nothing in this block does not turn into NaN.
        higher = tl.maximum(tl.maximum(most, tl.max(score, 1)), -1e30)
        fade = tl.exp2(most - higher)
        p = tl.exp2(score - higher[:, None])
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        most = higher
    result = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + (row[:, None] * HEADS + head) * DIM + dim[None, :], result.to(out.dtype.element_ty), rows_in)


def store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, table: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Write [T, kv heads, dim] keys and values to the pages of their slots."""
    assert k.stride(-1) == v.stride(-1) == 1
    tokens, heads, dim = k.shape
    _store[(tokens,)](
        k, v, keys, values, table, slots, positions,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), table.stride(0),
        HEADS=heads, HEADS_UP=triton.next_power_of_2(heads), DIM=dim, DIM_UP=triton.next_power_of_2(dim),
        PAGE=keys.shape[2], num_warps=1 if heads * dim <= 512 else 4,
    )  # fmt: skip


def decode(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, slots: Tensor, lengths: Tensor, out: Tensor,
    scale: float, window: int | None, splits: int,
) -> None:  # fmt: skip
    """One query per row: `q` [R, heads, dim] against `lengths[r]` keys of slot `slots[r]`, into `out`."""
    rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    partial = weights = out
    if splits > 1:
        partial = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=q.device)
        weights = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=q.device)
    up = max(16, triton.next_power_of_2(dim))
    _decode[(rows, kv_heads, splits)](
        q, keys, values, table, slots, lengths, out, partial, weights, scale,
        q.stride(0), q.stride(1), table.stride(0),
        HEADS=heads, GROUP=heads // kv_heads, GROUP_UP=max(16, triton.next_power_of_2(heads // kv_heads)),
        DIM=dim, DIM_UP=up, PAGE=keys.shape[2], BLOCK=max(16, min(128, 8192 // up)), SPLITS=splits,
        WINDOW=window or 0, num_warps=4, num_stages=3 if q.element_size() == 2 else 2,
    )  # fmt: skip
    if splits > 1:
        _join[(rows * heads,)](partial, weights, out, DIM=dim, DIM_UP=up, SPLITS=splits, num_warps=2)


def prefill(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, tiles: Tensor, chunks: Tensor, out: Tensor,
    scale: float, window: int | None, rows: int,
) -> None:  # fmt: skip
    """Chunks of prompts: each query sees its own past in the cache. `rows` queries a tile, as `tiles` was laid out."""
    _, heads, dim = q.shape
    up = max(16, triton.next_power_of_2(dim))
    _prefill[(len(tiles), heads)](
        q, keys, values, table, tiles, chunks, out, scale,
        q.stride(0), q.stride(1), table.stride(0),
        HEADS=heads, GROUP=heads // keys.shape[1], DIM=dim, DIM_UP=up, PAGE=keys.shape[2],
        ROWS=rows, BLOCK=64 if up <= 128 and q.element_size() == 2 else 32, WINDOW=window or 0,
        num_warps=4, num_stages=2,
    )  # fmt: skip
