"""Defines the `paceline` parser and what its commands share."""

import argparse
import sys
import textwrap
from collections.abc import Callable

from paceline import __version__
from paceline.config import LoadedConfig
from paceline.config.fields import places

OVERRIDES = """
any key of the run file can be set on the command line, by its dotted path:
  --staleness 2   --trainer.optimizer.lr 1e-4   --env.0.group_size 4   --deterministic
`paceline check FILE` prints every key with its value, `paceline config KEY` what a key means.
"""
COMMON_KEYS = (
    "resume",
    "name",
    "runs",
    "steps",
    "seed",
    "batch_size",
    "group_size",
    "staleness",
    "model.name",
    "sampling.max_tokens",
    "trainer.optimizer.lr",
    "eval.every",
    "checkpoint.every",
    "device",
    "placement",
    "deterministic",
)
FILE = (
    "run file (TOML), run directory, example of the package (quickstart, algorithms/gae, ...) or environment type "
    "(reverse-text, gsm8k, ...)"
)

Run = Callable[[argparse.Namespace, list[str]], int]
"""Gets the arguments that are known and all others, and answers with the exit code."""
_PLAIN = argparse.RawDescriptionHelpFormatter


class Commands:
    """The `paceline` parser, command by command."""

    def __init__(self, epilog: str) -> None:
        self.parser = argparse.ArgumentParser(
            prog="paceline",
            description="Reinforcement learning for language models, on a laptop as on a cluster.",
            epilog=epilog,
            formatter_class=_PLAIN,
            allow_abbrev=False,
        )
        self.parser.add_argument("--version", action="version", version=f"paceline {__version__}")
        self._all = self.parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    @property
    def parsers(self) -> dict[str, argparse.ArgumentParser]:
        """Each command's own parser, by the command's name."""
        return dict(self._all.choices)

    def add(self, name: str, run: Run, text: str, epilog: str = "") -> argparse.ArgumentParser:
        sub = self._all.add_parser(
            name, help=text, description=text, epilog=epilog, formatter_class=_PLAIN, allow_abbrev=False
        )
        sub.set_defaults(run=run)
        return sub


def common_keys() -> str:
    """The keys of a run file that are set most often, as flags, with what the schema says of each."""
    spots = {".".join(map(str, path)): spot for path, spot in places()}
    flags = {key: f"--{key.replace('_', '-')}" for key in COMMON_KEYS}
    width = max(map(len, flags.values()))
    lines = []
    for key, flag in flags.items():
        meaning = " ".join(spots[key].help.split()).partition(". ")[0].rstrip(".")
        lines += textwrap.wrap(meaning, 110, initial_indent=f"  {flag:{width}}  ", subsequent_indent=" " * (width + 4))
    return "\nkeys of the run file, most often set:\n" + "\n".join(lines) + "\n"


def old_spelling(parser: argparse.ArgumentParser, old: str, new: str, kind: Callable[[str], object] = str) -> None:
    """An option's former name, which still works and is not shown."""
    dest = new.removeprefix("--").replace("-", "_")
    parser.add_argument(old, dest=dest, type=kind, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def show_warnings(loaded: LoadedConfig) -> None:
    for warning in loaded.warnings:
        print(f"paceline: warning: {warning}", file=sys.stderr)
