"""Chooses the rows that train and their order: mixtures, epochs, a curriculum.

A draw is a pure function of (seed, draw index) and, under a curriculum, of its accuracies: noise is counter-based. So a
resumed run draws what an unbroken one would.
"""

import base64
import binascii
import math
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.env import CurriculumConfig
from paceline.data.rows import BadRows, DataError, Row, Rows, RowSubset
from paceline.data.sources import StoredRows, open_rows


class Cursor:
    """Walks shuffled epochs over `rows` rows of one environment.

    >>> cursor = Cursor(rows=2, seed=0, name="demo")
    >>> [epoch for epoch, _, _ in (cursor.draw() for _ in range(5))]
    [0, 0, 1, 1, 2]
    """

    def __init__(self, rows: int, seed: int, name: str) -> None:
        self.rows, self.draws = rows, 0
        self._key = (seed, zlib.crc32(name.encode()))
        self._epoch, self._order = -1, np.empty(0, np.int64)

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

    def metrics(self) -> dict[str, float]:
        """How far the rows are learned, where the order depends on it; keys of a mixture's parts begin with theirs."""
        return {}

    def state(self) -> Any:
        return self.draws

    def load(self, state: Any) -> str:
        """Back to a checkpoint's state. Answers with what differs from then in the settings; empty if nothing does."""
        if isinstance(state, dict):
            raise DataError("the checkpoint was made with a curriculum: resume it with `curriculum = true`")
        if not isinstance(state, int):
            raise DataError("the checkpoint mixes several datasets, the run file has one: resume it with all of them")
        self.draws = state
        return ""


class Curriculum(Cursor):
    """Prefers rows the policy cannot do yet: p = (1 - floor) softmax(sharpness (1 - accuracy)) + floor / N, where a
    row's accuracy is a moving average over its rollouts."""

    def __init__(self, rows: int, seed: int, name: str, settings: CurriculumConfig | None = None) -> None:
        super().__init__(rows, seed, name)
        self._key = (*self._key, zlib.crc32(b"curriculum"))
        self._settings = settings or CurriculumConfig()
        # Single precision is what a checkpoint keeps, so it is what a run works with.
        self.accuracy: NDArray[np.float32] = np.full(rows, self._settings.start, np.float32)
        self.seen: NDArray[np.bool_] = np.zeros(rows, np.bool_)
        """Rows of which a rollout has finished."""
        self._weights = SumTree(self._weight(self.accuracy))

    def _weight(self, accuracy: NDArray[np.float32]) -> NDArray[np.float64]:
        return np.exp(self._settings.sharpness * (1.0 - accuracy.astype(np.float64)))

    def _row(self, draw: int) -> int:
        blind, place = np.random.default_rng((*self._key, draw)).random(2)
        return int(place * self.rows) if blind < self._settings.floor else self._weights.find(place)

    def update(self, row: int, rewards: Sequence[float]) -> None:
        """Move the row's accuracy by the rewards of a finished group: as if by one rollout after the other, in the mean
        over all orders they may come in."""
        if len(rewards) == 0:
            return
        passed = sum(reward >= self._settings.pass_at for reward in rewards) / len(rewards)
        kept = (1.0 - self._settings.rate) ** len(rewards)
        self.accuracy[row] = kept * float(self.accuracy[row]) + (1.0 - kept) * passed
        self.seen[row] = True
        self._weights[row] = float(self._weight(self.accuracy[row : row + 1])[0])

    def probabilities(self) -> NDArray[np.float64]:
        weights, floor = self._weights.leaves[: self.rows], self._settings.floor
        return (1.0 - floor) * weights / weights.sum() + floor / self.rows

    def metrics(self) -> dict[str, float]:
        """Mean accuracy, shares of all rows, and Kish's effective number of rows, 1 / sum of p squared."""
        c, seen = self._settings, self.seen
        return {
            "accuracy": float(self.accuracy.mean(dtype=np.float64)),
            "seen": float(seen.mean()),
            "effective_rows": float(1.0 / np.square(self.probabilities()).sum()),
            "mastered": float((seen & (self.accuracy >= np.float32(c.mastered_at))).mean()),
            "hopeless": float((seen & (self.accuracy <= np.float32(c.hopeless_at))).mean()),
        }

    def state(self) -> dict[str, Any]:
        packed = {"accuracy": self.accuracy.astype("<f4").tobytes(), "seen": np.packbits(self.seen).tobytes()}
        texts = {name: base64.b64encode(zlib.compress(data)).decode("ascii") for name, data in packed.items()}
        return {"draws": self.draws, "rows": self.rows, "settings": self._settings.model_dump(), **texts}

    def load(self, state: dict[str, Any]) -> str:
        if not isinstance(state, dict):
            raise DataError("the checkpoint was made without a curriculum: resume it without one")
        if state["rows"] != self.rows:
            raise DataError(f"the checkpoint's curriculum knows {state['rows']} rows, the dataset has {self.rows}")
        accuracy = _unpack(state["accuracy"])
        if len(accuracy) != 4 * self.rows:
            raise DataError(f"the checkpoint's curriculum holds {len(accuracy) // 4} accuracies for {self.rows} rows")
        now, then = self._settings.model_dump(), state.get("settings", CurriculumConfig().model_dump())
        self.draws, self.accuracy = state["draws"], np.frombuffer(accuracy, "<f4").astype(np.float32)
        if "seen" in state:
            bits = np.frombuffer(_unpack(state["seen"]), np.uint8)
            if len(bits) != (self.rows + 7) // 8:
                raise DataError(f"the checkpoint's curriculum marks {8 * len(bits)} rows as seen, not {self.rows}")
            self.seen = np.unpackbits(bits, count=self.rows).astype(np.bool_)
        else:  # of a version that did not mark them
            self.seen = self.accuracy != np.float32(then["start"])
        self.accuracy[~self.seen] = now["start"]
        self._weights = SumTree(self._weight(self.accuracy))
        changed = [f"{name} from {then[name]:g} to {now[name]:g}" for name in now if now[name] != then.get(name)]
        return f"the curriculum's {', '.join(changed)}" if changed else ""


def _unpack(text: str) -> bytes:
    try:
        return zlib.decompress(base64.b64decode(text, validate=True))
    except (binascii.Error, zlib.error) as error:
        raise DataError(f"the checkpoint's curriculum cannot be read: {error}") from error


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

    @property
    def leaves(self) -> NDArray[np.float64]:
        """The numbers themselves, and zeros behind them."""
        return self._sums[self._size :]

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
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int,
        name: str,
        *,
        curriculum: bool | CurriculumConfig = False,
        labels: Sequence[str] = (),
    ) -> None:
        super().__init__(sum(sizes), seed, name)
        self._parts = [_part_cursor(size, seed, f"{name}/{part}", curriculum) for part, size in enumerate(sizes)]
        self._weights, self._ends = tuple(weights), list(accumulate(sizes))
        self._labels = labels or [str(part) for part in range(len(sizes))]

    def _row(self, draw: int) -> int:
        index = min(range(len(self._parts)), key=lambda p: (self._parts[p].draws + 0.5) / self._weights[p])
        part = self._parts[index]
        return self._ends[index] - part.rows + part.draw()[2]

    def update(self, row: int, rewards: Sequence[float]) -> None:
        part = self._parts[index := bisect_right(self._ends, row)]
        part.update(row - (self._ends[index] - part.rows), rewards)

    def metrics(self) -> dict[str, float]:
        parts = zip(self._labels, self._parts, strict=True)
        return {f"{label}/{name}": value for label, part in parts for name, value in part.metrics().items()}

    def state(self) -> list:
        return [part.state() for part in self._parts]

    def load(self, state: list) -> str:
        found = len(state) if isinstance(state, list) else 1
        if found != len(self._parts) or not isinstance(state, list):
            raise DataError(f"the checkpoint mixes {found} datasets, the run file {len(self._parts)}")
        changes = [part.load(its) for part, its in zip(self._parts, state, strict=True)]
        self.draws = sum(part.draws for part in self._parts)
        return next(filter(None, changes), "")  # the settings are the same for all


class Mixture(Rows):
    """The rows of all parts, one part after the other. How often each is drawn is the cursor's affair."""

    def __init__(self, parts: Mapping[str, Sequence[Row]], weights: Mapping[str, float]) -> None:
        if not parts:
            raise DataError("a mixture needs at least one dataset")
        for name, rows in parts.items():
            if not len(rows):
                raise DataError(f"dataset {name}: holds no rows")
            if not 0 < weights.get(name, 0.0) < math.inf:
                raise DataError(f"dataset {name}: its weight must be a number above 0, not {weights.get(name)}")
        self.names = tuple(parts)
        self.weights = tuple(float(weights[name]) for name in parts)
        self.parts = tuple(parts.values())
        self._ends = tuple(accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def labels(self) -> list[str]:
        """A short word for each part, as metrics name it: the file's or the task's name, numbered where two are alike.

        >>> rows = [{"prompt": "?"}]
        >>> parts = dict.fromkeys(["a/gcd.jsonl", "b/gcd.jsonl", "train@owner/maths", "reasoning-gym:gcd?size=9"], rows)
        >>> Mixture(parts, dict.fromkeys(parts, 1.0)).labels
        ['gcd', 'gcd-2', 'maths', 'gcd-3']
        """
        labels, stems = list[str](), Counter[str]()
        for name in self.names:
            place = name.partition("?")[0].rpartition("/")[2]
            stem = place.rpartition(":")[2].rpartition("@")[2].split(".")[0] or "rows"
            stems[stem] += 1
            labels.append(stem if stems[stem] == 1 else f"{stem}-{stems[stem]}")
        return labels

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(part) for part in self.parts)

    def keep(self, indices: Sequence[int]) -> "Mixture":
        """The same mixture of some of its rows, given in ascending order."""
        kept: list[list[int]] = [[] for _ in self.parts]
        for part, offset in map(self.locate, indices):
            kept[part].append(offset)
        parts = dict(zip(self.names, map(RowSubset, self.parts, kept), strict=True))
        return Mixture(parts, dict(zip(self.names, self.weights, strict=True)))

    def _row(self, index: int) -> Row:
        part, offset = self.locate(index)
        return self.parts[part][offset]

    def locate(self, index: int) -> tuple[int, int]:
        """The part that holds a row, and the row's place in it."""
        part = bisect_right(self._ends, index)
        return part, index - self._ends[part] + len(self.parts[part])


def skipped_rows(rows: Sequence[Row]) -> list[BadRows]:
    """The rows that were left out where these were opened, by dataset."""
    if isinstance(rows, Mixture):
        return [bad for part in rows.parts for bad in skipped_rows(part)]
    if isinstance(rows, RowSubset):
        return skipped_rows(rows.rows)
    return [rows.bad] if isinstance(rows, StoredRows) and rows.bad else []


def place_in_source(rows: Sequence[Row], index: int) -> tuple[str | None, int]:
    """Where a row stands: its dataset if several are mixed, and its number there from 1, with the bad ones counted."""
    if isinstance(rows, Mixture):
        part, offset = rows.locate(index)
        return rows.names[part], place_in_source(rows.parts[part], offset)[1]
    if isinstance(rows, RowSubset):
        return place_in_source(rows.rows, rows.indices[index])
    return None, (rows.stored_number(index) if isinstance(rows, StoredRows) else index) + 1


def open_dataset(
    source: str | Sequence[str] | Mapping[str, float], fields: Mapping[str, str] | None = None, **options: Any
) -> Sequence[Row]:
    """The rows that a run file's `dataset` names: one URI, several in equal shares, or several by weight. `options` are
    those of `open_rows`."""
    if isinstance(source, str):
        return open_rows(source, fields, **options)
    weights = source if isinstance(source, Mapping) else dict.fromkeys(source, 1.0)
    return Mixture({uri: open_rows(uri, fields, **options) for uri in weights}, weights)


def make_cursor(rows: Sequence[Row], seed: int, name: str, curriculum: bool | CurriculumConfig = False) -> Cursor:
    """The order in which an environment's rows are drawn: by weight for a mixture, by accuracy under a curriculum."""
    if isinstance(rows, Mixture):
        return MixtureCursor(rows.sizes, rows.weights, seed, name, curriculum=curriculum, labels=rows.labels)
    return _part_cursor(len(rows), seed, name, curriculum)


def _part_cursor(rows: int, seed: int, name: str, curriculum: bool | CurriculumConfig) -> Cursor:
    if not curriculum:
        return Cursor(rows, seed, name)
    return Curriculum(rows, seed, name, None if curriculum is True else curriculum)
