"""Bars that a benchmark must clear, its table, and the JSON object on its last line."""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One comparison: ours against a peer in the same run."""

    what: str
    unit: str
    ours: float
    peer: float
    peer_name: str
    ratio: float
    """Larger is better for us."""
    bar: float

    @property
    def cleared(self) -> bool:
        return self.ratio >= self.bar


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    return parser


def alternate(rounds: int, *runs: Callable[[], float]) -> list[float]:
    """Medians of several runs taken in turn, so that a noisy machine disturbs all of them alike."""
    results = [[run() for run in runs] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*results, strict=True)]


def machine() -> dict:
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("PACELINE_COMMIT")
        or commit.stdout.strip() + ("+changes" if dirty.stdout.strip() else ""),
        "command": " ".join(["python", *sys.argv]),
    }


def finish(title: str, rows: list[Row], path: Path | None, **extra: object) -> int:
    """Print the table and the JSON line; 1 if a bar was missed."""
    table = Table(title=title)
    for heading in ("what", "ours", "peer", "", "ratio", "bar"):
        table.add_column(heading)
    for row in rows:
        mark = "[green]ok[/]" if row.cleared else "[red]missed[/]"
        ours, peer = f"{row.ours:,.3g} {row.unit}", f"{row.peer:,.3g} {row.unit}"
        table.add_row(row.what, ours, peer, row.peer_name, f"{row.ratio:.2f}x", f">= {row.bar}x {mark}")
    Console(width=140).print(table)
    cleared = all(row.cleared for row in rows)
    result = {"title": title, "cleared": cleared, "rows": [asdict(row) for row in rows], **extra, **machine()}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0 if cleared else 1
