"""Chooses between the live view and one plain picture."""

import os
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console

from paceline.errors import PacelineError
from paceline.record import RunFolder, find_runs, open_run
from paceline.top.look import Looker
from paceline.ui.runs import Runs

PLAIN_WIDTH = 100


def watch(path: Path) -> None:
    """Show a run, or those of a folder, until the user quits; without a terminal, print one picture."""
    if not path.is_dir():
        raise PacelineError(f"there is no run at {path}: name a run directory, such as runs/quickstart")
    found = find_runs(path)
    if not found:
        raise PacelineError(f"there is no run in {path}: name a run directory, such as runs/quickstart")
    if not (sys.stdout.isatty() and sys.stdin.isatty()) or os.environ.get("TERM") == "dumb":
        encoding = sys.stdout.encoding or "utf-8"
        print(snapshot(open_run(found[0])).encode(encoding, "replace").decode(encoding), end="")
        return
    from paceline.top.app import Top  # textual takes a moment, and a pipe needs none of it

    Top(Runs(path)).run()


def snapshot(run: RunFolder, width: int = PLAIN_WIDTH) -> str:
    """The picture as plain text."""
    page = Console(file=StringIO(), width=width, color_system=None, highlight=False, emoji=False)
    page.print(Looker(run).look().drawn(width))
    assert isinstance(page.file, StringIO)
    return "\n".join(row.rstrip() for row in page.file.getvalue().splitlines()) + "\n"
