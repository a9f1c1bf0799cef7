"""`paceline config`, `init` and `data`: keys of the run file, files to begin with, rows as the model sees them."""

import argparse
import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.commands.commands import Commands, old_spelling
from paceline.config.keys import ConfigTable, find_tables, key_schema, tables
from paceline.config.load import example_names
from paceline.config.target import KINDS, write_starter
from paceline.errors import PacelineError

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
    if known.list:
        return _list()
    files = write_starter(known.kind, Path(known.to), known.name, known.force)
    file = shlex.quote(os.fspath(files[0]))
    print("wrote", ", ".join(map(str, files)))
    print("next:")
    print(f"  paceline rollout {file} -n 2     look at episodes before training")
    print(f"  paceline check {file}            every key, and whether it fits this machine")
    print(f"  paceline train {file}")
    return 0


def _list() -> int:
    for kind, (_, text) in KINDS.items():
        print(f"{kind:12} {text}")
    print("\n" + textwrap.fill(f"or any example: {', '.join(example_names())}", 100, break_on_hyphens=False))
    return 0


DATA = """
examples:
  paceline data rows.jsonl                                 the first rows, as the model will see them
  paceline data train.parquet --field question=prompt --field gt_answer=answer --model ./my-model
  paceline data demonstrations.jsonl --demonstrations      what would be trained, in green
"""


def add_data(commands: Commands) -> None:
    data = commands.add("data", _data, "Show dataset rows as the model will see them, with token counts.", DATA)
    data.add_argument("source", help="file or URI: .jsonl, .json, .csv, .parquet, .arrow, split@hub/name")
    data.add_argument("-n", "--count", type=int, default=5, help="rows to show (5)")
    old_spelling(data, "--limit", "--count", int)
    data.add_argument("--model", default="paceline:quickstart", help="whose tokenizer and chat template")
    data.add_argument("--field", action="append", default=[], metavar="THEIRS=OURS", help="rename a field; repeatable")
    data.add_argument("--demonstrations", action="store_true", help="rows must end in an assistant message")


def _data(known: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console

    import paceline.envs  # noqa: F401 - they bring schemes of their own, such as `reasoning-gym:`
    from paceline.commands.show import show_rows
    from paceline.config.model import ModelConfig
    from paceline.data import open_rows, skipped
    from paceline.model import load_tokenizer

    wrong = [pair for pair in known.field if not all(pair.partition("="))]
    if wrong:
        raise PacelineError(f"--field {wrong[0]}: write THEIRS=OURS, such as --field question=prompt")
    fields = dict(pair.split("=", 1) for pair in known.field)
    rows = open_rows(known.source, fields, demonstrations=known.demonstrations)
    show_rows(rows, load_tokenizer(ModelConfig(name=known.model)), known.count, Console())
    for bad in skipped(rows):
        print(f"paceline: {bad}", file=sys.stderr)
    return 0


LISTING = """
examples:
  paceline config                                          every key
  paceline config trainer.optimizer                        one table
  paceline config env.gsm8k                                one kind of environment
  paceline config sampling.temperature                     one key
  paceline config trainer --json                           its JSON schema
  paceline config --markdown > docs/config.md              the page of the documentation
"""
INTRODUCTION = """# Every key of the run file

<!-- Written by `paceline config --markdown > docs/config.md`: change the docstrings under the fields in
src/paceline/config/ and write it anew. -->

A run file holds only what differs from the defaults below. Any key can be set on the command line by its dotted path,
the elements of a list by their place or name: `--trainer.optimizer.lr 1e-4`, `--env.0.group_size 4`. `unset` keys may
be left out; what that means stands beside them. `paceline config KEY` shows a part of this page in a terminal, and
`paceline check FILE` a run file with all of its values."""


def add_config(commands: Commands) -> None:
    config = commands.add("config", _config, "List every key of the run file: default, type, meaning.", LISTING)
    config.add_argument("key", nargs="?", default="", help="show this table or key alone, such as trainer.optimizer")
    form = config.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the JSON schema of it")
    form.add_argument("--markdown", action="store_true", help="print it as docs/config.md has it")


def _config(known: argparse.Namespace, rest: list[str]) -> int:
    if known.json:
        print(json.dumps(key_schema(known.key), indent=2))
        return 0
    found = find_tables(known.key) if known.key else tables()
    width = min(shutil.get_terminal_size().columns, 100)
    print(markdown(found) if known.markdown else "\n".join(_lines(found, width)))
    return 0


def markdown(found: Iterable[ConfigTable]) -> str:
    """The tables as a page."""
    parts = [INTRODUCTION]
    for table in found:
        parts.append(f"## `{table.header}`" if table.path else "## Top of the file")
        if table.meaning:
            parts.append(table.meaning)
        if table.keys:
            rows = [f"| `{k.name}` | {_cell(k.kind)} | {_value(k.default)} | {_cell(k.meaning)} |" for k in table.keys]
            parts.append("\n".join(["| key | takes | default | meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _value(default: str) -> str:
    return default if default in ("unset", "required", "its own defaults") else f"`{_cell(default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _lines(found: Iterable[ConfigTable], width: int) -> Iterator[str]:
    for table in found:
        yield table.header
        yield from textwrap.wrap(table.meaning, width, initial_indent="# ", subsequent_indent="# ")
        for key in table.keys:
            yield f"  {key.name} = {key.default}   ({key.kind})"
            yield from textwrap.wrap(key.meaning, width, initial_indent="      ", subsequent_indent="      ")
        yield ""
