"""The integers of one captured step of a fixed size: what the host writes and the device reads."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.engine.pages import PAGE
from paceline.engine.sequence import Chunk

Buffer = TypeVar("Buffer", np.ndarray, Tensor)
TILE_ROWS = 64
"""Queries one program of the prefill kernel works on."""


def split(buffer: Buffer, sizes: dict[str, int]) -> dict[str, Buffer]:
    """Named stretches of one int64 buffer, so that a whole step's inputs cross in one copy."""
    ends = itertools.accumulate(sizes.values())
    return {name: buffer[end - size : end] for (name, size), end in zip(sizes.items(), ends, strict=True)}


def fields(buffer: Tensor, sizes: dict[str, int]) -> SimpleNamespace:
    """The stretches as the device's code reads them."""
    out = SimpleNamespace(**split(buffer, sizes))
    out.temperatures = out.temperatures.view(torch.float64)
    out.tiles, out.chunks = out.tiles.view(-1, 2), out.chunks.view(-1, 4)
    return out


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
        self._fields = split(self._inputs, self.sizes)
        self._decoding: tuple[list[int], list[int]] = ([], [])
        """Arrivals and slots of the sequences that decoded in the last step, if that is all it did. Not the sequences:
        those that are done shall not be kept for the sake of a size that is seldom used."""

    def fill(
        self,
        buffer: np.ndarray,
        chunks: Sequence[Chunk],
        changed: dict[tuple[int, int], int],
        columns: int,
        scratch: int,
    ) -> Sequence[Chunk]:
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

    def _begin(self, a: dict[str, np.ndarray], chunks: Sequence[Chunk], scratch: int) -> list[Chunk]:
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

    def _move_on(self, a: dict[str, np.ndarray], singles: Sequence[Chunk]) -> None:
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

    def _fill_prompts(self, a: dict[str, np.ndarray], prompts: Sequence[Chunk]) -> list[int]:
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


def decode_only(chunks: Sequence[Chunk]) -> bool:
    """Whether every chunk is a sequence's last token, from which the next is sampled."""
    n = len(chunks)
    return [c.length for c in chunks].count(1) == n and [c.samples for c in chunks].count(True) == n
