"""Draws rows: in shuffled epochs, several datasets by weight, or hard rows more often.

A draw is a pure function of (seed, draw index) and, under a curriculum, of its accuracies: noise is counter-based. So a
resumed run draws what an unbroken one would.
"""

import base64
import binascii
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.rows import DataError


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
        """The next (epoch, draw index, row). An epoch is as many draws as there are rows, whichever they are."""
        draw = self.draws
        self.draws += 1
        return draw // self.rows, draw, self._row(draw)

    def _row(self, draw: int) -> int:
        epoch = draw // self.rows
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((*self._key, epoch)).permutation(self.rows)
        return int(self._order[draw % self.rows])

    def update(self, row: int, rewards: Sequence[float]) -> None:
        """A group of the row is finished. Shuffled epochs ignore it."""

    def state(self) -> Any:
        """For the checkpoint: plain JSON."""
        return self.draws

    def load(self, state: Any) -> None:
        self.draws = state


BETA = 0.05
"""Weight of the newest rollout in a row's accuracy."""
START = 0.5
"""Accuracy of a row that was never tried."""
PASS = 0.5
"""Rewards from here on count as right."""
SHARPNESS = 3.0
FLOOR = 1e-3
"""Share of draws that ignore accuracy, so that no row is ever out of reach."""


class Curriculum(Cursor):
    """Prefers rows the policy cannot do yet: p = (1 - e) softmax(3 (1 - accuracy)) + e / N.

    A row's accuracy is a moving average over its rollouts, from 0.5. The sums are those of a tree, which depend on its
    leaves and not on the order in which they came to be.
    """

    def __init__(self, rows: int, seed: int, name: str) -> None:
        super().__init__(rows, seed, name)
        self._key = (*self._key, zlib.crc32(b"curriculum"))
        # Single precision is what a checkpoint keeps, so it is what a run works with.
        self.accuracy: NDArray[np.float32] = np.full(rows, START, np.float32)
        self._weights = SumTree(_weight(self.accuracy))

    def _row(self, draw: int) -> int:
        blind, place = np.random.default_rng((*self._key, draw)).random(2)
        return int(place * self.rows) if blind < FLOOR else self._weights.find(place)

    def update(self, row: int, rewards: Sequence[float]) -> None:
        """Move the row's accuracy by the rewards of a finished group.

        The average moves as if by one rollout after the other, in the mean over all orders they may come in: a group
        has no first rollout.
        """
        if len(rewards) == 0:
            return
        rate = sum(reward >= PASS for reward in rewards) / len(rewards)
        kept = (1.0 - BETA) ** len(rewards)
        self.accuracy[row] = kept * float(self.accuracy[row]) + (1.0 - kept) * rate
        self._weights[row] = float(_weight(self.accuracy[row : row + 1])[0])

    def probabilities(self) -> NDArray[np.float64]:
        """Of each row to be the next."""
        weights = _weight(self.accuracy)
        return (1.0 - FLOOR) * weights / weights.sum() + FLOOR / self.rows

    def state(self) -> dict[str, Any]:
        packed = base64.b64encode(zlib.compress(self.accuracy.astype("<f4").tobytes()))
        return {"draws": self.draws, "rows": self.rows, "accuracy": packed.decode("ascii")}

    def load(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict):
            raise DataError("the checkpoint was made without a curriculum: resume it without one")
        if state["rows"] != self.rows:
            raise DataError(f"the checkpoint's curriculum knows {state['rows']} rows, the dataset has {self.rows}")
        try:
            packed = zlib.decompress(base64.b64decode(state["accuracy"], validate=True))
        except (binascii.Error, zlib.error) as error:
            raise DataError(f"the checkpoint's curriculum cannot be read: {error}") from error
        if len(packed) != 4 * self.rows:
            raise DataError(f"the checkpoint's curriculum holds {len(packed) // 4} accuracies for {self.rows} rows")
        self.draws = state["draws"]
        self.accuracy = np.frombuffer(packed, "<f4").astype(np.float32)
        self._weights = SumTree(_weight(self.accuracy))


def _weight(accuracy: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.exp(SHARPNESS * (1.0 - accuracy.astype(np.float64)))


class SumTree:
    """Numbers with their sums over every half, quarter, eighth: one is changed or found in log N steps.

    >>> tree = SumTree(np.array([1.0, 2.0, 1.0]))
    >>> [tree.find(place) for place in (0.0, 0.24, 0.25, 0.74, 0.75, 0.99)]
    [0, 0, 1, 1, 2, 2]
    """

    def __init__(self, leaves: NDArray[np.float64]) -> None:
        self._size = 1 << (len(leaves) - 1).bit_length()
        self._sums = np.zeros(2 * self._size)
        self._sums[self._size : self._size + len(leaves)] = leaves
        level = self._size
        while level > 1:
            below = self._sums[level : 2 * level]
            level //= 2
            self._sums[level : 2 * level] = below[0::2] + below[1::2]

    def __setitem__(self, leaf: int, value: float) -> None:
        # Sums are made anew from below, never adjusted: what was there before leaves no rounding behind.
        node = self._size + leaf
        self._sums[node] = value
        while node > 1:
            node //= 2
            self._sums[node] = self._sums[2 * node] + self._sums[2 * node + 1]

    def find(self, place: float) -> int:
        """The leaf that covers a place in [0, 1) of the whole."""
        node, mass = 1, place * self._sums[1]
        while node < self._size:
            node *= 2
            left = self._sums[node]
            # Rounding may push the mass past the last leaf that has any.
            if mass >= left and self._sums[node + 1] > 0:
                mass -= left
                node += 1
        return node - self._size


class MixtureCursor(Cursor):
    """Walks each part by a cursor of its own; the part that lags most behind its share is next.

    After any n draws the parts have been served as fairly as whole draws allow (Sainte-Laguë: the least
    (draws + 1/2) / weight goes first), so each batch is mixed alike and no part comes in streaks.

    >>> cursor = MixtureCursor(sizes=(2, 10), weights=(1.0, 2.0), seed=0, name="demo")
    >>> [cursor.draw()[2] >= 2 for _ in range(6)]
    [True, False, True, True, False, True]
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int, name: str, *, curriculum: bool = False
    ) -> None:
        super().__init__(sum(sizes), seed, name)
        part_cursor = Curriculum if curriculum else Cursor
        self._weights = tuple(weights)
        self._parts = [part_cursor(size, seed, f"{name}/{part}") for part, size in enumerate(sizes)]
        self._ends = list(accumulate(sizes))

    def _row(self, draw: int) -> int:
        index = min(range(len(self._parts)), key=lambda p: (self._parts[p].draws + 0.5) / self._weights[p])
        part = self._parts[index]
        return self._ends[index] - part.rows + part.draw()[2]

    def update(self, row: int, rewards: Sequence[float]) -> None:
        index = bisect_right(self._ends, row)
        part = self._parts[index]
        part.update(row - (self._ends[index] - part.rows), rewards)

    def state(self) -> list:
        return [part.state() for part in self._parts]

    def load(self, state: list) -> None:
        if len(state) != len(self._parts):
            raise DataError(f"the checkpoint mixes {len(state)} datasets, the run file {len(self._parts)}")
        for part, its in zip(self._parts, state, strict=True):
            part.load(its)
        self.draws = sum(part.draws for part in self._parts)
