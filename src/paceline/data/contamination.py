"""Drops training rows that share thirteen words in a row with a held-out row.

Thirteen is the length of Brown et al. (arXiv 2005.14165, appendix C). Words are compared without case and punctuation.
System messages do not count, because all rows of a task have the same one; an instruction that stands in every user
message does count, and the report then names it.
"""

import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.data.mixture import Mixture
from paceline.data.rows import DataError, Row, RowSubset

LENGTH = 13
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
    """All runs of n words in the given rows. Words are numbered, and a run is its numbers as bytes: exact, and found in
    one look into a set.

    Most rows share nothing, and that is seen sooner: n words in a row, wherever they begin, cover one of the blocks of
    (n + 1) / 2 words that a text is cut into, so a text none of whose blocks is known is clean.
    """

    def __init__(self, rows: Sequence[Row], length: int = LENGTH) -> None:
        self._length = length
        self._block = (length + 1) // 2
        self._numbers: dict[str, int] = {}
        self._runs: set[bytes] = set()
        self._blocks: set[bytes] = set()
        for row in rows:
            for words in texts(row):
                code = array("i", [self._numbers.setdefault(word, len(self._numbers)) for word in words]).tobytes()
                self._runs.update(_pieces(code, length))
                self._blocks.update(_pieces(code, self._block))

    def first(self, said: Sequence[Text]) -> str | None:
        """The first words that are shared; None if none are."""
        for words in said:
            if len(words) >= self._length and (start := self._find(words)) is not None:
                return " ".join(words[start : start + self._length])
        return None

    def _find(self, words: Text) -> int | None:
        """The place at which the first shared run begins."""
        code = array("i", [self._numbers.get(word, -1) for word in words]).tobytes()
        if self._blocks.isdisjoint(_pieces(code, self._block, step=self._block)):
            return None
        return next((at for at, run in enumerate(_pieces(code, self._length)) if run in self._runs), None)


def _pieces(code: bytes, length: int, step: int = 1) -> list[bytes]:
    """Runs of so many words, four bytes each."""
    return [code[4 * at : 4 * (at + length)] for at in range(0, len(code) // 4 - length + 1, step)]


def texts(row: Row) -> list[Text]:
    """The words of each message but the system's; of a row of tokens, the tokens."""
    if "messages" not in row:
        return [[f"#{token}" for token in row.get("input_token_ids", ())]]
    heard = (message for message in row["messages"] if message.get("role") not in ("system", "developer"))
    return [normalised(_text(message.get("content"))) for message in heard]


def normalised(text: str) -> Text:
    """
    >>> normalised("Janet's ducks lay 16 EGGS, per day.")
    ['janet', 's', 'ducks', 'lay', '16', 'eggs', 'per', 'day']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _text(content: str | list[dict] | None) -> str:
    if isinstance(content, list):
        return " ".join(part.get("text") or "" for part in content)
    return content or ""


def decontaminate(
    rows: Sequence[Row], held_out: Sequence[Row], length: int = LENGTH
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
