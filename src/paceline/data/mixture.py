"""Mixes datasets by weight, and drops training rows that overlap held-out ones."""

import math
import re
import unicodedata
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from paceline.data.rows import BadRows, DataError, Row, Rows, RowSubset
from paceline.data.sampler import Curriculum, Cursor, MixtureCursor
from paceline.data.sources import StoredRows, open_rows


class Mixture(Rows):
    """The rows of all parts, one part after the other. How often each is drawn is the cursor's affair."""

    def __init__(self, parts: Mapping[str, Sequence[Row]], weights: Mapping[str, float]) -> None:
        if not parts:
            raise DataError("a mixture needs at least one dataset")
        for name, rows in parts.items():
            if not len(rows):
                raise DataError(f"dataset {name}: holds no rows")
            if not (weight := weights.get(name, 0.0)) > 0 or not math.isfinite(weight):
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
        kept: dict[str, list[int]] = {name: [] for name in self.names}
        for index in indices:
            part, offset = self._locate(index)
            kept[self.names[part]].append(offset)
        parts = {name: RowSubset(part, kept[name]) for name, part in zip(self.names, self.parts, strict=True)}
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
"""The words of one message."""


@dataclass(slots=True)
class ContaminationReport:
    """The rows that were checked, dropped or too short."""

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

    def drop(self, row: int, words: str) -> None:
        self.shared[words] += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append((row, words))

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
        self._length = length
        self._block = (length + 1) // 2
        self._numbers: dict[str, int] = {}
        self._runs: set[bytes] = set()
        self._blocks: set[bytes] = set()
        for row in rows:
            for words in texts(row):
                code = array("i", [self._numbers.setdefault(word, len(self._numbers)) for word in words]).tobytes()
                self._runs.update(_ngrams(code, length))
                self._blocks.update(_ngrams(code, self._block))

    def first(self, said: Sequence[Text]) -> str | None:
        """The first words that are shared; None if none are."""
        for words in said:
            if len(words) >= self._length and (start := self._find(words)) is not None:
                return " ".join(words[start : start + self._length])
        return None

    def _find(self, words: Text) -> int | None:
        """The place at which the first shared run begins."""
        code = array("i", [self._numbers.get(word, -1) for word in words]).tobytes()
        if self._blocks.isdisjoint(_ngrams(code, self._block, step=self._block)):
            return None
        return next((at for at, run in enumerate(_ngrams(code, self._length)) if run in self._runs), None)


def _ngrams(code: bytes, length: int, step: int = 1) -> list[bytes]:
    """Runs of so many words, four bytes each."""
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
        if (shared := overlap.first(said)) is not None:
            report.drop(index, shared)
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
