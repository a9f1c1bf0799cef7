"""`paceline config`: every key of the run file, with its default, type and meaning."""

import argparse
import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator

from paceline.cli.commands import Commands
from paceline.config.keys import ConfigTable, find_tables, key_schema, tables

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
