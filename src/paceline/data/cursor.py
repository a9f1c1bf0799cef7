"""Draws rows by a pure function of (seed, epoch, index), so a resumed run draws as an unbroken one."""

import zlib

import numpy as np
from numpy.typing import NDArray


class Cursor:
    """Walks shuffled epochs over `rows` rows of one environment.

    >>> cursor = Cursor(rows=2, seed=0, name="demo")
    >>> [epoch for epoch, _, _ in (cursor.draw() for _ in range(5))]
    [0, 0, 1, 1, 2]
    """

    def __init__(self, rows: int, seed: int, name: str) -> None:
        self.rows = rows
        self.draws = 0
        self._key = (seed, zlib.crc32(name.encode()))
        self._epoch = -1
        self._order: NDArray = np.empty(0, np.int64)

    def draw(self) -> tuple[int, int, int]:
        """The next (epoch, draw index, row)."""
        draw, epoch = self.draws, self.draws // self.rows
        self.draws += 1
        return epoch, draw, int(self._order_of(epoch)[draw % self.rows])

    def _order_of(self, epoch: int) -> NDArray:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((*self._key, epoch)).permutation(self.rows)
        return self._order

    def state(self) -> int:
        return self.draws

    def load(self, draws: int) -> None:
        self.draws = draws
