"""Finished trials, one line each in a file, so that none is repeated."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.observe.monitor import read_jsonl


@dataclass(frozen=True)
class Row:
    """One finished trial; `start` and `end` are those of its first measure."""

    task: str
    algorithm: str
    seed: int
    start: float
    end: float
    steps: int
    seconds: float
    """Of training and evaluation, over all sittings."""
    others: dict[str, tuple[float, float]]
    """What else was measured: before and after, or there and here."""
    cleared: bool


class TrialLog:
    """Rows by task and seed, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        kept = read_jsonl(path) if path.exists() else []
        self.rows = {(row["task"], row["seed"]): Row(**row) for row in kept}

    def enter(self, row: Row) -> None:
        self.rows[row.task, row.seed] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def show(rows: Sequence[Row]) -> None:
    table = Table(title="learning on this CPU")
    for heading in ("task", "algorithm", "seed", "start", "end", "steps", "seconds", "besides", ""):
        table.add_column(heading)
    for row in rows:
        besides = ", ".join(f"{name} {start:.2f} -> {end:.2f}" for name, (start, end) in row.others.items())
        mark = "[green]ok[/]" if row.cleared else "[red]missed[/]"
        figures = (f"{row.start:.2f}", f"{row.end:.2f}", str(row.steps), f"{row.seconds:.0f}")
        table.add_row(row.task, row.algorithm, str(row.seed), *figures, besides, mark)
    Console(width=150).print(table)
