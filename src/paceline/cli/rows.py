"""Rows of a dataset."""

import argparse
import sys

from paceline.cli.commands import Commands, old_spelling
from paceline.errors import PacelineError

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
    from paceline.config.model import Model
    from paceline.data import open_rows, skipped
    from paceline.model import load_tokenizer
    from paceline.rollout.show import show_rows

    wrong = [pair for pair in known.field if not all(pair.partition("="))]
    if wrong:
        raise PacelineError(f"--field {wrong[0]}: write THEIRS=OURS, such as --field question=prompt")
    fields = dict(pair.split("=", 1) for pair in known.field)
    rows = open_rows(known.source, fields, demonstrations=known.demonstrations)
    show_rows(rows, load_tokenizer(Model(name=known.model)), known.count, Console())
    for bad in skipped(rows):
        print(f"paceline: {bad}", file=sys.stderr)
    return 0
