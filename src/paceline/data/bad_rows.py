"""Rows that cannot be used: each is skipped, counted and named, and too many of them are an error."""

from collections.abc import Callable, Sequence

from paceline.errors import PacelineError

FIRST = 20
"""When so many rows from the first on are all bad, the rest is not looked at."""
LEAST, SHARE = 20, 0.01
"""Bad rows are too many from this number on, if they are also more than this share of all; or where they are half."""
NAMED = 3
"""Bad rows that a sentence names."""


class BadRows:
    """The bad rows of one dataset. `kind` is the error to raise over too many."""

    def __init__(self, kind: type[PacelineError] = PacelineError) -> None:
        self._kind = kind
        self.seen = 0
        """Rows looked at, good or bad."""
        self.indices: set[int] = set()
        self.first: list[str] = []
        """A sentence for each of the first: its place, and what is wrong with it."""

    def __len__(self) -> int:
        return len(self.indices)

    def good(self) -> None:
        self.seen += 1

    def bad(self, sentence: str) -> None:
        """Count the next row; raises when none of the first rows is any good."""
        self.indices.add(self.seen)
        self.seen += 1
        if len(self.first) < NAMED:
            self.first.append(sentence)
        if len(self) == self.seen == FIRST:
            self.settle()

    def settle(self) -> None:
        """All were looked at: raises if too many are bad."""
        half = bool(self) and 2 * len(self) >= self.seen
        if half or (len(self) >= LEAST and len(self) > SHARE * self.seen):
            first, *others = self.first
            others = [f"{len(self)} of the first {self.seen} rows are bad", *others] if self.seen > 1 else []
            raise self._kind("; ".join([first, *others]))

    def __str__(self) -> str:
        """What was skipped, as a sentence; empty where nothing was."""
        if not self:
            return ""
        rows = "1 row is" if len(self) == 1 else f"{len(self)} rows are"
        more = "; ..." if len(self) > NAMED else ""
        return f"{rows} skipped, of {self.seen}: {'; '.join(self.first)}{more}"


def look_through(rows: Sequence[object], look: Callable[[int], object], refused: type[PacelineError]) -> BadRows:
    """The rows at which `look` raises the error `refused`; that error again where they are too many."""
    found = BadRows(refused)
    for number in range(len(rows)):
        try:
            look(number)
        except refused as error:
            found.bad(str(error))
        else:
            found.good()
    found.settle()
    return found
