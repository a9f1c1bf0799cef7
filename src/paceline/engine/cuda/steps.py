"""One captured step of a fixed size: what the host writes, what the device does with it.

The sampler as two Triton kernels: one pass over the logits, then one block of them per row.

The same draw as `sampler.sample`: one uniform number per token, inverted through the cumulative distribution, blocks
first. Reading the logits once, in their own type, is what makes a vocabulary of 150,000 cheap.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.engine.pages import PAGE
from paceline.engine.sequence import Chunk

TILE_ROWS = 64
"""Queries one program of the prefill kernel works on."""


class Fields:
    """Named stretches of one int64 buffer, so that a whole step's inputs cross in one copy."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    adapters: Tensor
    lengths: Tensor
    rows: Tensor
    keys: Tensor
    indices: Tensor
    temperatures: Tensor
    targets: Tensor
    tiles: Tensor
    chunks: Tensor
    places: Tensor
    pages: Tensor

    def __init__(self, buffer: Tensor, sizes: dict[str, int]) -> None:
        at = 0
        for name, size in sizes.items():
            setattr(self, name, buffer[at : at + size])
            at += size
        self.temperatures = self.temperatures.view(torch.float64)
        self.tiles = self.tiles.view(-1, 2)
        self.chunks = self.chunks.view(-1, 4)


class StepShape:
    """`rows` single tokens that decode, then `extra` tokens of prompts; `draws` of them all are sampled from.

    Most steps decode the sequences of the step before, each a token further. What says who they are is then still
    there, and only what changes with every token is written again.
    """

    def __init__(self, rows: int, extra: int, draws: int) -> None:
        self.rows, self.extra, self.draws = rows, extra, draws
        prompts = min(extra, draws)
        tokens = rows + extra
        self.updates = rows + -(-extra // PAGE) + prompts
        self.sizes = {
            "ids": tokens,
            "positions": tokens,
            "slots": tokens,
            "adapters": tokens,
            "lengths": rows,
            "rows": draws,
            "keys": draws,
            "indices": draws,
            "temperatures": draws,
            "targets": draws,
            "tiles": 2 * (-(-extra // TILE_ROWS) + prompts),
            "chunks": 4 * prompts,
            "places": self.updates,
            "pages": self.updates,
        }
        self.size = sum(self.sizes.values())
        self.same = False
        """Whether the last step decoded the sequences of the one before it in this size, and nothing else."""
        self._inputs = np.zeros(self.size, np.int64)
        self._fields = dict(self._split(self._inputs))
        self._decoding: tuple[list[int], list[int]] = ([], [])
        """Arrivals and slots of the sequences that decoded in the last step, if that is all it did. Not the sequences:
        those that are done shall not be kept for the sake of a size that is seldom used."""

    def fill(
        self,
        buffer: np.ndarray,
        chunks: Seq[Chunk],
        changed: dict[tuple[int, int], int],
        columns: int,
        scratch: int,
    ) -> Seq[Chunk]:
        """Write a step's inputs; answers with the chunks that are sampled from, in the order of their draws.

        `chunks` come single tokens first, and among those the ones that are sampled from: where nothing but single
        tokens is computed, row and draw are the same number. Padding belongs to the scratch slot, whose page is
        never read.
        """
        a = self._fields
        before, self._decoding = self._decoding, ([], [])
        if decode_only(chunks):
            self._decoding = ([c.sequence.arrival for c in chunks], [c.sequence.slot for c in chunks])
        self.same = bool(self._decoding[0]) and self._decoding == before
        if self.same:
            drawn = chunks
            self._move_on(a, chunks)
        else:
            drawn = self._begin(a, chunks, scratch)
        a["indices"][: len(drawn)] = [c.index for c in drawn]
        a["places"].fill(scratch * columns)
        a["pages"].fill(0)
        if changed:
            slots, cells = np.array(list(changed)).T
            a["places"][: len(changed)] = slots * columns + cells
            a["pages"][: len(changed)] = list(changed.values())
        buffer[: self.size] = self._inputs
        return drawn

    def _begin(self, a: dict[str, np.ndarray], chunks: Seq[Chunk], scratch: int) -> list[Chunk]:
        """Write all inputs of a step, whatever the last one held."""
        singles = [c for c in chunks if c.length == 1]
        prompts = [c for c in chunks if c.length > 1]
        for name in ("ids", "positions", "adapters", "lengths", "keys", "indices"):
            a[name].fill(0)
        a["slots"].fill(scratch)
        a["slots"][: len(singles)] = [c.sequence.slot for c in singles]
        ends = self._fill_prompts(a, prompts) if self.extra else []
        drawn = [c for c in singles if c.samples] + [c for c in prompts if c.samples]
        rows = [i for i, c in enumerate(singles) if c.samples] + ends
        self._fill_draws(a, drawn, rows, scratch)
        self._move_on(a, singles)
        return drawn

    def _move_on(self, a: dict[str, np.ndarray], singles: Seq[Chunk]) -> None:
        """Write the inputs that change with every token of a sequence that decodes."""
        n = len(singles)
        if not n:
            return
        starts = np.array([c.start for c in singles])
        a["positions"][:n] = starts
        a["lengths"][:n] = starts + 1
        a["adapters"][:n] = [c.adapter for c in singles]
        # -1: the device knows the token, the host has not seen it yet.
        tokens = [(c.sequence.tokens, c.start) for c in singles]
        a["ids"][:n] = [t[at] if at < len(t) else -1 for t, at in tokens]

    def _fill_prompts(self, a: dict[str, np.ndarray], prompts: Seq[Chunk]) -> list[int]:
        """Answers with the rows of the last tokens of those that are sampled from."""
        at, ends, tiles = self.rows, [], []
        for number, chunk in enumerate(prompts):
            stop = at + chunk.length
            a["ids"][at:stop] = chunk.sequence.tokens[chunk.start : chunk.start + chunk.length]
            a["positions"][at:stop] = range(chunk.start, chunk.start + chunk.length)
            a["slots"][at:stop] = chunk.sequence.slot
            a["adapters"][at:stop] = chunk.adapter
            a["chunks"][4 * number : 4 * number + 4] = (at, chunk.length, chunk.start, chunk.sequence.slot)
            tiles += [(number, begin) for begin in range(0, chunk.length, TILE_ROWS)]
            if chunk.samples:
                ends.append(stop - 1)
            at = stop
        a["tiles"].fill(-1)
        if tiles:
            a["tiles"][: 2 * len(tiles)] = np.array(tiles).ravel()
        return ends

    def _fill_draws(self, a: dict[str, np.ndarray], drawn: list[Chunk], rows: list[int], scratch: int) -> None:
        n = len(drawn)
        requests = [c.sequence.request for c in drawn]
        a["rows"].fill(0)
        a["rows"][:n] = rows
        a["keys"][:n] = [r.noise for r in requests]
        a["targets"].fill(scratch)
        a["targets"][:n] = [c.sequence.slot for c in drawn]
        temperatures = a["temperatures"].view(np.float64)
        temperatures.fill(1.0)
        temperatures[:n] = [r.temperature for r in requests]

    def _split(self, buffer: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        at = 0
        for name, size in self.sizes.items():
            yield name, buffer[at : at + size]
            at += size


def decode_only(chunks: Seq[Chunk]) -> bool:
    """Whether every chunk is a sequence's last token, from which the next is sampled."""
    n = len(chunks)
    return [c.length for c in chunks].count(1) == n and [c.samples for c in chunks].count(True) == n


BLOCK = 2048


@triton.jit
def _mix(x):
    """splitmix64's finaliser, as in `model.torch_bits.mix`."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _measure(logits, temperatures, most, mass, best, vocabulary, blocks, BLOCK: tl.constexpr):
    """Largest scaled logit of a block, where it is, and the block's mass relative to it."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row).to(tl.float32)
    temperature = tl.where(temperature == 0, 1.0, temperature)
    x = tl.load(logits + row.to(tl.int64) * vocabulary + token, token < vocabulary, float("-inf")).to(tl.float32)
    x = x / temperature
    top, where = tl.max(x, 0, return_indices=True)
    place = row * blocks + block
    tl.store(most + place, top)
    tl.store(best + place, where + block * BLOCK)
    tl.store(mass + place, tl.sum(tl.exp(x - top), 0))


@triton.jit
def _draw(
    logits, temperatures, keys, indices, slots, most, mass, best, tokens, logprobs, last, vocabulary, blocks,
    BLOCK: tl.constexpr, BLOCKS_UP: tl.constexpr,
):  # fmt: skip
    """Pick the block, then the token inside it; tell the next step through `last`."""
    row = tl.program_id(0)
    given = tl.load(temperatures + row).to(tl.float32)
    temperature = tl.where(given == 0, 1.0, given)
    block = tl.arange(0, BLOCKS_UP)
    there = block < blocks
    tops = tl.load(most + row * blocks + block, there, float("-inf"))
    top = tl.max(tops, 0)
    weights = tl.load(mass + row * blocks + block, there, 0.0).to(tl.float64) * tl.exp(tops - top).to(tl.float64)
    total = tl.sum(weights, 0)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    index = tl.load(indices + row).to(tl.uint64, bitcast=True)
    u = (_mix(key ^ _mix(index)) >> 11).to(tl.float64) * 1.1102230246251565e-16
    # Just under the total, so that rounding never picks a weightless last entry.
    target = tl.minimum(u * total, total * (1 - 1e-12))
    sums = tl.cumsum(weights, 0)
    chosen = tl.minimum(tl.sum((sums <= target).to(tl.int32), 0), blocks - 1)
    rest = target - tl.sum(tl.where(block < chosen, weights, 0.0), 0)
    token = chosen * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * vocabulary + token, token < vocabulary, float("-inf")).to(tl.float32)
    x = x / temperature
    p = tl.exp(x - top).to(tl.float64)
    inner_sums = tl.cumsum(p, 0)
    rest = tl.minimum(rest, tl.max(inner_sums, 0) * (1 - 1e-12))
    inside = tl.minimum(tl.sum((inner_sums <= rest).to(tl.int32), 0), BLOCK - 1)
    picked = tl.minimum(chosen * BLOCK + inside, vocabulary - 1)
    # Both are held inside their bounds: where logits are NaN, padding may win, and the host is yet to see it.
    _, winner = tl.max(tops, 0, return_indices=True)
    greedy = tl.load(best + row * blocks + tl.minimum(winner, blocks - 1))
    picked = tl.maximum(tl.minimum(tl.where(given == 0, greedy, picked), vocabulary - 1), 0)
    raw = tl.load(logits + row.to(tl.int64) * vocabulary + picked).to(tl.float32) / temperature
    tl.store(tokens + row, picked.to(tl.int64))
    tl.store(logprobs + row, (raw - top - tl.log(total).to(tl.float32)).to(logprobs.dtype.element_ty))
    tl.store(last + tl.load(slots + row), picked.to(tl.int64))


def draw(
    logits: Tensor, temperatures: Tensor, keys: Tensor, indices: Tensor, slots: Tensor,
    tokens: Tensor, logprobs: Tensor, last: Tensor,
) -> None:  # fmt: skip
    """Sample every row of `logits` into `tokens` and `logprobs`, and leave each token in `last[slot]`."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    most, mass = (torch.empty(rows, blocks, dtype=torch.float32, device=logits.device) for _ in range(2))
    best = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    _measure[(rows, blocks)](logits, temperatures, most, mass, best, vocabulary, blocks, BLOCK=BLOCK, num_warps=4)
    _draw[(rows,)](
        logits, temperatures, keys, indices, slots, most, mass, best, tokens, logprobs, last, vocabulary, blocks,
        BLOCK=BLOCK, BLOCKS_UP=triton.next_power_of_2(blocks), num_warps=4,
    )  # fmt: skip
