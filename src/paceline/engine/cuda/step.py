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


def split_fields(buffer: Buffer, sizes: dict[str, int]) -> dict[str, Buffer]:
    """Named stretches of one int64 buffer, so that a whole step's inputs cross in one copy."""
    ends = itertools.accumulate(sizes.values())
    return {name: buffer[end - size : end] for (name, size), end in zip(sizes.items(), ends, strict=True)}


def device_fields(buffer: Tensor, sizes: dict[str, int]) -> SimpleNamespace:
    """The stretches as the device's code reads them."""
    out = SimpleNamespace(**split_fields(buffer, sizes))
    out.temperatures = out.temperatures.view(torch.float64)
    out.tiles, out.chunks = out.tiles.view(-1, 2), out.chunks.view(-1, 4)
    return out


class StepShape:
    """`rows` single tokens that decode, then `prefill_tokens` tokens of prompts; `draws` of them all are sampled from.

    Most steps decode the sequences of the step before, each a token further. What says who they are is then still
    there, and only what changes with every token is written again.
    """

    def __init__(self, rows: int, prefill_tokens: int, draws: int) -> None:
        self.rows, self.prefill_tokens, self.draws = rows, prefill_tokens, draws
        prompts = min(prefill_tokens, draws)
        tokens = rows + prefill_tokens
        self.table_updates = rows + -(-prefill_tokens // PAGE) + prompts
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
            "tiles": 2 * (-(-prefill_tokens // TILE_ROWS) + prompts),
            "chunks": 4 * prompts,
            "places": self.table_updates,
            "pages": self.table_updates,
        }
        self.size = sum(self.sizes.values())
        self.same_sequences = False
        """Whether the last step decoded the sequences of the one before it in this size, and nothing else."""
        self._inputs = np.zeros(self.size, np.int64)
        self._fields = split_fields(self._inputs, self.sizes)
        self._decoding: tuple[list[int], list[int]] = ([], [])
        """Arrivals and slots of the sequences that decoded in the last step, if that is all it did. Not the sequences:
        those that are done shall not be kept for the sake of a size that is seldom used."""

    def fill(
        self, buffer: np.ndarray, chunks: Sequence[Chunk], changed: dict[tuple[int, int], int],
        columns: int, scratch: int,
    ) -> Sequence[Chunk]:  # fmt: skip
        """Write a step's inputs; answers with the chunks that are sampled from, in the order of their draws.

        `chunks` come single tokens first, and among those the ones that are sampled from: where nothing but single
        tokens is computed, row and draw are the same number. Padding belongs to the scratch slot, whose page is
        never read.
        """
        inputs = self._fields
        before, self._decoding = self._decoding, ([], [])
        if is_decode_only(chunks):
            self._decoding = ([c.sequence.arrival for c in chunks], [c.sequence.slot for c in chunks])
        self.same_sequences = bool(self._decoding[0]) and self._decoding == before
        if self.same_sequences:
            sampled_chunks = chunks
            self._fill_decode(inputs, chunks)
        else:
            sampled_chunks = self._fill_all(inputs, chunks, scratch)
        inputs["indices"][: len(sampled_chunks)] = [c.index for c in sampled_chunks]
        inputs["places"].fill(scratch * columns)
        inputs["pages"].fill(0)
        if changed:
            slots, cells = np.array(list(changed)).T
            inputs["places"][: len(changed)] = slots * columns + cells
            inputs["pages"][: len(changed)] = list(changed.values())
        buffer[: self.size] = self._inputs
        return sampled_chunks

    def _fill_all(self, inputs: dict[str, np.ndarray], chunks: Sequence[Chunk], scratch: int) -> list[Chunk]:
        """Write all inputs of a step, whatever the last one held."""
        singles = [c for c in chunks if c.length == 1]
        prompts = [c for c in chunks if c.length > 1]
        for name in ("ids", "positions", "adapters", "lengths", "keys", "indices"):
            inputs[name].fill(0)
        inputs["slots"].fill(scratch)
        inputs["slots"][: len(singles)] = [c.sequence.slot for c in singles]
        ends = self._fill_prompts(inputs, prompts) if self.prefill_tokens else []
        sampled_chunks = [c for c in singles if c.samples_token] + [c for c in prompts if c.samples_token]
        rows = [i for i, c in enumerate(singles) if c.samples_token] + ends
        self._fill_draws(inputs, sampled_chunks, rows, scratch)
        self._fill_decode(inputs, singles)
        return sampled_chunks

    def _fill_decode(self, inputs: dict[str, np.ndarray], singles: Sequence[Chunk]) -> None:
        """Write the inputs that change with every token of a sequence that decodes."""
        n = len(singles)
        if not n:
            return
        starts = np.array([c.start for c in singles])
        inputs["positions"][:n] = starts
        inputs["lengths"][:n] = starts + 1
        inputs["adapters"][:n] = [c.adapter for c in singles]
        # -1: the device knows the token, the host has not seen it yet.
        tokens = [(c.sequence.tokens, c.start) for c in singles]
        inputs["ids"][:n] = [t[at] if at < len(t) else -1 for t, at in tokens]

    def _fill_prompts(self, inputs: dict[str, np.ndarray], prompts: Sequence[Chunk]) -> list[int]:
        """Answers with the rows of the last tokens of those that are sampled from."""
        at, ends, tiles = self.rows, [], []
        for number, chunk in enumerate(prompts):
            stop = at + chunk.length
            inputs["ids"][at:stop] = chunk.sequence.tokens[chunk.start : chunk.start + chunk.length]
            inputs["positions"][at:stop] = range(chunk.start, chunk.start + chunk.length)
            inputs["slots"][at:stop] = chunk.sequence.slot
            inputs["adapters"][at:stop] = chunk.adapter
            inputs["chunks"][4 * number : 4 * number + 4] = (at, chunk.length, chunk.start, chunk.sequence.slot)
            tiles += [(number, begin) for begin in range(0, chunk.length, TILE_ROWS)]
            if chunk.samples_token:
                ends.append(stop - 1)
            at = stop
        inputs["tiles"].fill(-1)
        if tiles:
            inputs["tiles"][: 2 * len(tiles)] = np.array(tiles).ravel()
        return ends

    def _fill_draws(
        self, inputs: dict[str, np.ndarray], sampled_chunks: list[Chunk], rows: list[int], scratch: int
    ) -> None:
        n = len(sampled_chunks)
        requests = [c.sequence.request for c in sampled_chunks]
        inputs["rows"].fill(0)
        inputs["rows"][:n] = rows
        inputs["keys"][:n] = [r.noise for r in requests]
        inputs["targets"].fill(scratch)
        inputs["targets"][:n] = [c.sequence.slot for c in sampled_chunks]
        temperatures = inputs["temperatures"].view(np.float64)
        temperatures.fill(1.0)
        temperatures[:n] = [r.temperature for r in requests]


def is_decode_only(chunks: Sequence[Chunk]) -> bool:
    """Whether every chunk is a sequence's last token, from which the next is sampled."""
    n = len(chunks)
    return [c.length for c in chunks].count(1) == n and [c.samples_token for c in chunks].count(True) == n
