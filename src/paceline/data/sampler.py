"""Chooses the rows that train and their order: mixtures, epochs, a curriculum, nothing that is held out.

A draw is a pure function of (seed, draw index) and, under a curriculum, of its accuracies: noise is counter-based. So a
resumed run draws what an unbroken one would.
"""

import base64
import binascii
import math
import re
import unicodedata
import zlib
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

    def state(self) -> Any:
        return self.draws

    def load(self, state: Any) -> None:
        self.draws = state


BETA = 0.05
"""Weight of the newest rollout in a row's accuracy."""
START = 0.5
PASS = 0.5
SHARPNESS = 3.0
FLOOR = 1e-3
"""Share of draws that ignore accuracy, so that no row is ever out of reach."""


class Curriculum(Cursor):
    """Prefers rows the policy cannot do yet: p = (1 - e) softmax(3 (1 - accuracy)) + e / N, where a row's accuracy is a
    moving average over its rollouts, from 0.5."""

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
        """Move the row's accuracy by the rewards of a finished group: as if by one rollout after the other, in the mean
        over all orders they may come in."""
        if len(rewards) == 0:
            return
        rate = sum(reward >= PASS for reward in rewards) / len(rewards)
        kept = (1.0 - BETA) ** len(rewards)
        self.accuracy[row] = kept * float(self.accuracy[row]) + (1.0 - kept) * rate
        self._weights[row] = float(_weight(self.accuracy[row : row + 1])[0])

    def probabilities(self) -> NDArray[np.float64]:
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
        self._parts = [part_cursor(size, seed, f"{name}/{part}") for part, size in enumerate(sizes)]
        self._weights, self._ends = tuple(weights), list(accumulate(sizes))

    def _row(self, draw: int) -> int:
        index = min(range(len(self._parts)), key=lambda p: (self._parts[p].draws + 0.5) / self._weights[p])
        part = self._parts[index]
        return self._ends[index] - part.rows + part.draw()[2]

    def update(self, row: int, rewards: Sequence[float]) -> None:
        part = self._parts[index := bisect_right(self._ends, row)]
        part.update(row - (self._ends[index] - part.rows), rewards)

    def state(self) -> list:
        return [part.state() for part in self._parts]

    def load(self, state: list) -> None:
        if len(state) != len(self._parts):
            raise DataError(f"the checkpoint mixes {len(state)} datasets, the run file {len(self._parts)}")
        for part, its in zip(self._parts, state, strict=True):
            part.load(its)
        self.draws = sum(part.draws for part in self._parts)


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
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(part) for part in self.parts)

    def keep(self, indices: Sequence[int]) -> "Mixture":
        """The same mixture of some of its rows, given in ascending order."""
        kept: list[list[int]] = [[] for _ in self.parts]
        for part, offset in map(self._locate, indices):
            kept[part].append(offset)
        parts = dict(zip(self.names, map(RowSubset, self.parts, kept), strict=True))
        return Mixture(parts, dict(zip(self.names, self.weights, strict=True)))

    def _row(self, index: int) -> Row:
        part, offset = self._locate(index)
        return self.parts[part][offset]

    def _locate(self, index: int) -> tuple[int, int]:
        part = bisect_right(self._ends, index)
        return part, index - self._ends[part] + len(self.parts[part])


def skipped_rows(rows: Sequence[Row]) -> list[BadRows]:
    """The rows that were left out where these were opened, by dataset."""
    if isinstance(rows, Mixture):
        return [bad for part in rows.parts for bad in skipped_rows(part)]
    if isinstance(rows, RowSubset):
        return skipped_rows(rows.rows)
    return [rows.bad] if isinstance(rows, StoredRows) and rows.bad else []


def open_dataset(
    source: str | Sequence[str] | Mapping[str, float], fields: Mapping[str, str] | None = None, **options: Any
) -> Sequence[Row]:
    """The rows that a run file's `dataset` names: one URI, several in equal shares, or several by weight. `options` are
    those of `open_rows`."""
    if isinstance(source, str):
        return open_rows(source, fields, **options)
    weights = source if isinstance(source, Mapping) else dict.fromkeys(source, 1.0)
    return Mixture({uri: open_rows(uri, fields, **options) for uri in weights}, weights)


def make_cursor(rows: Sequence[Row], seed: int, name: str, curriculum: bool = False) -> Cursor:
    """The order in which an environment's rows are drawn: by weight for a mixture, by accuracy under a curriculum."""
    if isinstance(rows, Mixture):
        return MixtureCursor(rows.sizes, rows.weights, seed, name, curriculum=curriculum)
    return Curriculum(len(rows), seed, name) if curriculum else Cursor(len(rows), seed, name)


NGRAM_WORDS = 13
EXAMPLES = 5

_WORD = re.compile(r"\w+")

Text = list[str]


@dataclass(slots=True)
class ContaminationReport:
    checked: int = 0
    too_short: int = 0
    """Rows of fewer words than are compared, so that nothing can be said about them."""
    examples: list[tuple[int, str]] = field(default_factory=list)
    """Some dropped rows, each with words it shares."""
    shared: Counter[str] = field(default_factory=Counter)
    """Rows dropped, by the first words they share."""

    @property
    def dropped(self) -> int:
        return self.shared.total()

    def __str__(self) -> str:
        short = f"; {self.too_short} are too short to tell" if self.too_short else ""
        example = f'; row {self.examples[0][0] + 1} has "{self.examples[0][1]}"' if self.examples else ""
        return f"{self.dropped} of {self.checked} training rows overlap the evaluation split{example}{short}"


class Overlap:
    """All runs of n words in the given rows; thirteen is the length of Brown et al. (arXiv 2005.14165, appendix C).
    System messages do not count, because all rows of a task have the same one; an instruction that stands in every user
    message does count, and the report then names it. Words are numbered, and a run is its numbers as bytes: exact, and
    found in one look into a set.

    Most rows share nothing, and that is seen sooner: n words in a row, wherever they begin, cover one of the blocks of
    (n + 1) / 2 words that a text is cut into, so a text none of whose blocks is known is clean.
    """

    def __init__(self, rows: Sequence[Row], length: int = NGRAM_WORDS) -> None:
        self._length, self._block = length, (length + 1) // 2
        self._numbers: dict[str, int] = {}
        self._runs, self._blocks = set[bytes](), set[bytes]()
        for row in rows:
            for words in texts(row):
                code = array("i", [self._numbers.setdefault(word, len(self._numbers)) for word in words]).tobytes()
                self._runs.update(_ngrams(code, length))
                self._blocks.update(_ngrams(code, self._block))

    def first(self, said: Sequence[Text]) -> str | None:
        """The first words that are shared; None if none are."""
        for words in said:
            code = array("i", [self._numbers.get(word, -1) for word in words]).tobytes()
            if not self._blocks.isdisjoint(_ngrams(code, self._block, step=self._block)):
                for start, run in enumerate(_ngrams(code, self._length)):
                    if run in self._runs:
                        return " ".join(words[start : start + self._length])
        return None


def _ngrams(code: bytes, length: int, step: int = 1) -> list[bytes]:
    return [code[4 * at : 4 * (at + length)] for at in range(0, len(code) // 4 - length + 1, step)]


def texts(row: Row) -> list[Text]:
    """The words of each message but the system's; of a row of tokens, the tokens."""
    if "messages" not in row:
        return [[f"#{token}" for token in row.get("input_token_ids", ())]]
    heard = (message for message in row["messages"] if message.get("role") not in ("system", "developer"))
    return [normalise_text(_text(message.get("content"))) for message in heard]


def normalise_text(text: str) -> Text:
    """
    >>> normalise_text("Janet's ducks lay 16 EGGS, per day.")
    ['janet', 's', 'ducks', 'lay', '16', 'eggs', 'per', 'day']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _text(content: str | list[dict] | None) -> str:
    if isinstance(content, list):
        return " ".join(part.get("text") or "" for part in content)
    return content or ""


def decontaminate(
    rows: Sequence[Row], held_out: Sequence[Row], length: int = NGRAM_WORDS
) -> tuple[Sequence[Row], ContaminationReport]:
    """The rows that share no `length` words in a row with the held-out ones, and what happened to the others."""
    overlap, report, kept = Overlap(held_out, length), ContaminationReport(), array("q")
    for index, row in enumerate(rows):
        said = texts(row)
        report.checked += 1
        if (words := overlap.first(said)) is not None:
            report.shared[words] += 1
            report.examples += [(index, words)] if len(report.examples) < EXAMPLES else []
            continue
        kept.append(index)
        report.too_short += all(len(words) < length for words in said)
    if report.checked and not kept:
        words, count = report.shared.most_common(1)[0]
        raise DataError(
            f"all {report.checked} training rows overlap the evaluation split, {count} of them by "
            f'"{words}": if that is an instruction to all, put it into the system message'
        )
    if not report.dropped:
        return rows, report
    return rows.keep(kept) if isinstance(rows, Mixture) else RowSubset(rows, kept), report
