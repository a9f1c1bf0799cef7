"""Files to begin with."""

import argparse
import os
import shlex
import textwrap
from pathlib import Path

from paceline.cli.commands import Commands
from paceline.config.starters import KINDS

INIT = """
Writes a commented run file and, where one is needed, a Python file and rows, side by side. Change them and train.

examples:
  paceline init --list                                     what there is to begin with
  paceline init reward                                     reward.toml, reward.py and rows, here
  paceline init env --name my-task --to my-task            my-task.toml and its files, in a folder of their own
  paceline init algorithms/gae                             any example of the package
"""


def add_init(commands: Commands) -> None:
    init = commands.add("init", _init, "Write a run file, and the files it needs, to begin with.", INIT)
    init.add_argument(
        "kind", metavar="KIND", nargs="?", default="quickstart", help=f"{', '.join(KINDS)}; or any example (quickstart)"
    )
    init.add_argument("--list", action="store_true", help="list the kinds and the examples, and write nothing")
    init.add_argument("--name", help="name of the run and of its file (the kind)")
    init.add_argument("--to", metavar="FOLDER", default="", help="where to (here)")
    init.add_argument("--force", action="store_true", help="replace files that exist")


def _init(known: argparse.Namespace, rest: list[str]) -> int:
    from paceline.config.starters import write_starter

    if known.list:
        return _list()
    starter = write_starter(known.kind, Path(known.to), known.name, known.force)
    file = shlex.quote(os.fspath(starter.run_file))
    print("wrote", ", ".join(map(str, starter.files)))
    print("next:")
    print(f"  paceline rollout {file} -n 2     look at episodes before training")
    print(f"  paceline check {file}            every key, and whether it fits this machine")
    print(f"  paceline train {file}")
    return 0


def _list() -> int:
    from paceline.config.examples import example_names

    for kind, (_, text) in KINDS.items():
        print(f"{kind:12} {text}")
    print("\n" + textwrap.fill(f"or any example: {', '.join(example_names())}", 100, break_on_hyphens=False))
    return 0
