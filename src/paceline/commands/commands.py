"""Registers the commands of `paceline`, builds its parser, and holds what its commands share."""

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

from paceline import __version__
from paceline.config import LoadedConfig
from paceline.config.fields import key_paths

OVERRIDES_HELP = """
any key of the run file can be set on the command line, by its dotted path:
  --staleness 2   --trainer.optimizer.lr 1e-4   --env.0.group_size 4   --deterministic
`paceline check FILE` prints every key with its value, `paceline config KEY` what a key means.
"""
COMMON_KEYS = (
    *("resume", "name", "runs", "steps", "seed", "batch_size", "group_size", "staleness", "model.name"),
    *("sampling.max_tokens", "trainer.optimizer.lr", "eval.every", "checkpoint.every"),
    *("device", "placement", "engine.backend", "deterministic"),
)

EXAMPLES = """
examples:
  paceline train quickstart                                train the quickstart, about half a minute on a laptop
  paceline train quickstart --staleness 0                  the same, sampling and training in turn
  paceline init reward                                     files to begin with: rows and a reward function
  paceline train runs/quickstart/config.toml --resume latest --steps 80
  paceline check my-run.toml                               is it valid, does it fit, how long is a step?
  paceline rollout reverse-text -n 4                       look at episodes before training
  paceline play arenas/kuhn_poker                          take a seat yourself, against the policy
  paceline league runs/tic-tac-toe                         who beats whom among the versions of a self-play run
  paceline data rows.jsonl                                 look at rows as the model will see them
  paceline replay runs/quickstart 20                       a recorded batch's loss once more, component by component
  paceline doctor runs/quickstart                          is it alive, what does it wait for, how to resume it
  paceline top runs/quickstart                             watch it in a terminal
  paceline report runs/quickstart                          one HTML file to send to a colleague
  paceline ui                                              look at all runs in a browser, live
  paceline diff runs/a runs/b                              do two runs differ by more than chance, and in what?
  paceline ab my-run.toml --b.env.0.algo.type max_rl       which of two settings is better, and how sure that is
  paceline eval runs/quickstart paceline:quickstart        a run and the model it began from, on held-out rows
  paceline export runs/quickstart@30 -o my-model           a checkpoint as a Hugging Face folder
  paceline serve paceline:quickstart                       a model behind the OpenAI API
  paceline config trainer.optimizer                        keys of the run file: default, type, meaning
  paceline schema > paceline.schema.json                   completion and help in your editor
"""

COMMAND_ORDER = (
    *("init", "train", "ab", "check", "eval", "export", "serve", "rollout", "up", "status", "down", "play", "league"),
    *("replay", "doctor", "top", "report", "diff", "ui", "data", "search-server", "config", "schema"),
)
"""The order of `paceline --help`."""

Argument = tuple[tuple[str, ...], dict[str, Any]]
_HELP_FORMATTER = argparse.RawDescriptionHelpFormatter


def arg(*names: str, **options: Any) -> Argument:
    return names, options


def flag(name: str, text: str) -> Argument:
    return arg(name, action="store_true", help=text)


def deprecated_option(old: str, new: str, kind: Callable[[str], object] = str) -> Argument:
    """An option's former name, which still works and is not shown."""
    dest = new.removeprefix("--").replace("-", "_")
    return arg(old, dest=dest, type=kind, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


FILE_HELP = (
    "run file (TOML), run directory, example of the package (quickstart, algorithms/gae, ...) or environment type "
    "(reverse-text, gsm8k, ...)"
)
RUN_ARGUMENT = arg("directory", metavar="RUN", help="run directory, such as runs/quickstart")


class CommandSpec(NamedTuple):
    """A function and the arguments it takes; a list of them exclude one another."""

    run: FunctionType
    """Gets the arguments that are known and all others, and answers with the exit code; None is 0."""
    arguments: Sequence[Argument | list[Argument]]
    epilog: str
    keys: bool
    """Whether other arguments are keys of the run file."""


COMMANDS: dict[str, CommandSpec] = {}


def subcommand(
    *arguments: Argument | list[Argument], keys: bool = False, epilog: str = ""
) -> Callable[[FunctionType], FunctionType]:
    """Register a function as the command of its name. Its docstring is the help, and `epilog` goes below that."""

    def register(run: FunctionType) -> FunctionType:
        COMMANDS[run.__name__.strip("_").replace("_", "-")] = CommandSpec(run, arguments, epilog, keys)
        return run

    return register


class CommandParsers(NamedTuple):
    """The `paceline` parser, and each command's own by the command's name."""

    parser: argparse.ArgumentParser
    parsers: dict[str, argparse.ArgumentParser]


def command_parsers() -> CommandParsers:
    """The parser of all commands; importing the modules of commands has registered them."""
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Reinforcement learning for language models, on a laptop as on a cluster.",
        epilog=EXAMPLES,
        formatter_class=_HELP_FORMATTER,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMAND_ORDER:
        spec = COMMANDS[name]
        text, _, more = inspect.cleandoc(spec.run.__doc__ or "").partition("\n")
        more = f"{_fill_paragraphs(more)}\n{spec.epilog}"
        sub = subparsers.add_parser(
            name, help=text, description=text, epilog=more, formatter_class=_HELP_FORMATTER, allow_abbrev=False
        )
        sub.set_defaults(run=spec.run)
        for argument in spec.arguments:
            several = isinstance(argument, list)
            group = sub.add_mutually_exclusive_group() if several else sub
            for flags, options in argument if several else [argument]:
                group.add_argument(*flags, **options)
    return CommandParsers(parser, dict(subparsers.choices))


def _fill_paragraphs(text: str) -> str:
    """A docstring with its paragraphs filled to 120 columns, which indentation keeps it from; examples as they are."""
    paragraph = re.compile(r"^\S.*(?:\n\S.*)+", re.MULTILINE)
    return paragraph.sub(lambda found: textwrap.fill(found[0], 120, break_on_hyphens=False), text)


def common_keys() -> str:
    """The keys of a run file that are set most often, as flags, with what the schema says of each."""
    spots = {".".join(map(str, path)): spot for path, spot in key_paths()}
    flags = {key: f"--{key.replace('_', '-')}" for key in COMMON_KEYS}
    width = max(map(len, flags.values()))
    lines = []
    for key, name in flags.items():
        meaning = " ".join(spots[key].help.split()).partition(". ")[0].rstrip(".")
        lines += textwrap.wrap(meaning, 110, initial_indent=f"  {name:{width}}  ", subsequent_indent=" " * (width + 4))
    return "\nkeys of the run file, most often set:\n" + "\n".join(lines) + "\n"


def show_warnings(loaded: LoadedConfig) -> None:
    for warning in loaded.warnings:
        print(f"paceline: warning: {warning}", file=sys.stderr)
