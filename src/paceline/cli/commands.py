"""What all commands have in common."""

import argparse
import sys
from collections.abc import Callable

from paceline import __version__
from paceline.config import Loaded

OVERRIDES = """
any key of the run file can be set on the command line, by its dotted path:
  --staleness 2   --trainer.optimizer.lr 1e-4   --env.0.group_size 4   --deterministic
`paceline check FILE` prints every key with its value.
"""

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

    def add(self, name: str, run: Run, text: str, epilog: str = "") -> argparse.ArgumentParser:
        sub = self._all.add_parser(
            name, help=text, description=text, epilog=epilog, formatter_class=_PLAIN, allow_abbrev=False
        )
        sub.set_defaults(run=run)
        return sub


def show_warnings(loaded: Loaded) -> None:
    for warning in loaded.warnings:
        print(f"paceline: warning: {warning}", file=sys.stderr)
