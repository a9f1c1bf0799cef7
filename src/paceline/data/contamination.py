"""Finds training rows that overlap held-out ones, leaves them out, and reports which and by which words."""

import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from paceline.config.env import ContaminationConfig
from paceline.data.rows import DataError, Row, RowSubset
from paceline.data.sampler import Mixture, place_in_source

NGRAM_WORDS = 13
"""The length of Brown et al. (arXiv 2005.14165, appendix C)."""
MOST_LISTED = 10_000
"""Dropped rows that a report lists; all are counted."""
MOST_SHARED = 100
"""Shared words that a report counts rows by, the most frequent first."""

_WORD = re.compile(r"\w+")

Text = list[str]


@dataclass(slots=True)
class ContaminationReport:
    """Which training rows share how many words in a row with which held-out text."""

    words: int = NGRAM_WORDS
    checked: int = 0
    held_out: int = 0
    too_short: int = 0
    """Rows kept that have fewer words than are compared: of these only exact copies are found."""
    rows: list[tuple[str | None, int, str]] = field(default_factory=list)
    """Dropped rows: the dataset where several are mixed, the place in it from 1, and the first words shared."""
    shared: Counter[str] = field(default_factory=Counter)
    """Rows dropped, by the first words they share."""

    @property
    def dropped(self) -> int:
        return self.shared.total()

    @property
    def share(self) -> float:
        return self.dropped / max(1, self.checked)

    @property
    def first(self) -> str:
        """The first dropped row and its words, as a clause."""
        dataset, number, words = self.rows[0]
        return f'row {number}{f" of {dataset}" if dataset else ""} has "{words}"'

    def table(self) -> dict[str, Any]:
        """The report as JSON. Of a mixture, each row is named by its dataset too."""
        keys = ("dataset", "row", "words")
        listed = [{k: v for k, v in zip(keys, found, strict=True) if v is not None} for found in self.rows]
        counts = {"checked": self.checked, "held_out": self.held_out, "dropped": self.dropped, "share": self.share}
        shared = [{"words": words, "rows": count} for words, count in self.shared.most_common(MOST_SHARED)]
        return {"words": self.words, **counts, "too_short": self.too_short, "shared": shared, "rows": listed}

    def __str__(self) -> str:
        if not self.held_out:
            return f"contamination compares nothing: there are no held-out rows beside {self.checked} training rows"
        short = f"; {self.too_short} have fewer than {self.words} words and are no copies" if self.too_short else ""
        example = f"; {self.first}" if self.rows else ""
        return f"{self.dropped} of {self.checked} training rows overlap the evaluation split{example}{short}"


class Overlap:
    """All runs of n words in the given rows, and all rows of fewer words as a whole. System messages do not count,
    because all rows of a task have the same one; an instruction that stands in every user message does count, and the
    report then names it. Words are numbered, and a run is its numbers as bytes: exact, and found in one look into a
    set.

    Most rows share nothing, and that is seen sooner: n words in a row, wherever they begin, cover one of the blocks of
    (n + 1) / 2 words that a text is cut into, so a text none of whose blocks is known is clean.
    """

    def __init__(self, rows: Iterable[Row], length: int = NGRAM_WORDS) -> None:
        self._length, self._block = length, (length + 1) // 2
        self._numbers: dict[str, int] = {}
        self._runs, self._blocks = set[bytes](), set[bytes]()
        self._short: set[tuple[str, ...]] = set()
        for row in rows:
            said = texts(row)
            if self.is_short(said):
                self._short.add(_whole(said))
            for words in said:
                code = array("i", [self._numbers.setdefault(word, len(self._numbers)) for word in words]).tobytes()
                self._runs.update(_ngrams(code, length))
                self._blocks.update(_ngrams(code, self._block))

    def is_short(self, said: Sequence[Text]) -> bool:
        """Whether a row has no run of n words."""
        return all(len(words) < self._length for words in said)

    def first(self, said: Sequence[Text]) -> str | None:
        """The first words that are shared; None if none are."""
        if self.is_short(said):
            whole = _whole(said)
            return " ".join(whole) if whole and whole in self._short else None
        for words in said:
            code = array("i", [self._numbers.get(word, -1) for word in words]).tobytes()
            if not self._blocks.isdisjoint(_ngrams(code, self._block, step=self._block)):
                for start, run in enumerate(_ngrams(code, self._length)):
                    if run in self._runs:
                        return " ".join(words[start : start + self._length])
        return None


def _whole(said: Sequence[Text]) -> tuple[str, ...]:
    return tuple(chain.from_iterable(said))


def _ngrams(code: bytes, length: int, step: int = 1) -> list[bytes]:
    return [code[4 * at : 4 * (at + length)] for at in range(0, len(code) // 4 - length + 1, step)]


def texts(row: Any) -> list[Text]:
    """The words of each message but the system's; of a row of tokens, the tokens; of any other row, of each text."""
    if not isinstance(row, Mapping):
        return []
    if (messages := row.get("messages")) is not None:
        heard = (m for m in messages if isinstance(m, Mapping) and m.get("role") not in ("system", "developer"))
        return [normalise_text(_text(message.get("content"))) for message in heard]
    if (tokens := row.get("input_token_ids")) is not None:
        return [[f"#{token}" for token in tokens]]
    return [normalise_text(value) for value in row.values() if isinstance(value, str)]


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
    rows: Sequence[Row], held_out: Sequence[Row], length: int = NGRAM_WORDS, max_share: float = 1.0
) -> tuple[Sequence[Row], ContaminationReport]:
    """The rows that share no `length` words in a row with the held-out ones, and what happened to the others. Raises
    where more than `max_share` of them, or all, overlap."""
    overlap, report, kept = Overlap(held_out, length), ContaminationReport(length, held_out=len(held_out)), array("q")
    for index, row in enumerate(rows):
        said = texts(row)
        report.checked += 1
        if (words := overlap.first(said)) is not None:
            report.shared[words] += 1
            if len(report.rows) < MOST_LISTED:
                report.rows.append((*place_in_source(rows, index), words))
            continue
        kept.append(index)
        report.too_short += overlap.is_short(said)
    words, count = next(iter(report.shared.most_common(1)), ("", 0))
    if report.checked and not kept:
        raise DataError(
            f"all {report.checked} training rows overlap the evaluation split, {count} of them by "
            f'"{words}": if that is an instruction to all, put it into the system message'
        )
    if report.dropped > max_share * report.checked + 1e-9:
        raise DataError(
            f"{report.dropped} of {report.checked} training rows ({report.share:.1%}) overlap the evaluation split, "
            f"and contamination.max_share = {max_share:g} allows {max_share:.1%}: {report.first}, and {count} rows "
            f'have "{words}". Take them out of one of the two sets, or raise max_share'
        )
    if not report.dropped:
        return rows, report
    return rows.keep(kept) if isinstance(rows, Mixture) else RowSubset(rows, kept), report


def clean_rows(
    rows: Sequence[Row], held_out: Sequence[Row], setting: bool | ContaminationConfig
) -> tuple[Sequence[Row], ContaminationReport | None]:
    """The training rows as an environment's `contamination` wants them, and the report where it is on."""
    if setting is False:
        return rows, None
    c = ContaminationConfig() if setting is True else setting
    return decontaminate(rows, held_out, c.words, c.max_share)
