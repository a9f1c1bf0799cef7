"""A run's vital signs in a terminal: `paceline top RUN`. Imports neither torch nor transformers."""

import os
import sys
from pathlib import Path

from paceline.errors import PacelineError
from paceline.observe.record import find_runs, open_run
from paceline.observe.terminal.drawing import snapshot

__all__ = ["snapshot", "watch"]


def watch(path: Path) -> None:
    """Show a run, or those of a folder, until the user quits; without a terminal, print one picture."""
    found = find_runs(path) if path.is_dir() else []
    if not found:
        where = "in" if path.is_dir() else "at"
        raise PacelineError(f"there is no run {where} {path}: name a run directory, such as runs/quickstart")
    if not (sys.stdout.isatty() and sys.stdin.isatty()) or os.environ.get("TERM") == "dumb":
        encoding = sys.stdout.encoding or "utf-8"
        print(snapshot(open_run(found[0])).encode(encoding, "replace").decode(encoding), end="")
        return
    # textual takes a moment to import, and a pipe needs none of it
    from paceline.observe.terminal.app import TopApp
    from paceline.observe.web.runs import Runs

    TopApp(Runs(path)).run()
