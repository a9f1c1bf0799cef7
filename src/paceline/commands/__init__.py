"""The `paceline` command line: parses the arguments and calls the function of the command."""

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn, get_args

from paceline.commands import policies, run_directories, run_files, serving  # noqa: F401 - they register their commands
from paceline.commands.commands import COMMANDS, command_parsers
from paceline.config import ConfigError
from paceline.config.keys import key_nodes
from paceline.errors import PacelineError
from paceline.observe.monitor.text import restore_paths
from paceline.util.gc_tuning import raise_gc_thresholds
from paceline.util.process_exit import exit_process

__all__ = ["command", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The `paceline` command. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    commands = command_parsers()
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if argv and not argv[0].startswith("-") and argv[0] not in commands.parsers:
        near = get_close_matches(argv[0], commands.parsers, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"the commands are {', '.join(commands.parsers)}"
        print(f"paceline: there is no command `{argv[0]}`; {hint}", file=sys.stderr)
        return 2
    if argv and argv[0] in COMMANDS and COMMANDS[argv[0]].keys:
        argv = _join_values(argv, commands.parsers[argv[0]])
    known, rest = commands.parser.parse_known_args(argv)
    actions = [action for action in commands.parsers[known.command]._actions if action.help != argparse.SUPPRESS]
    options = [option for action in actions for option in action.option_strings if option.startswith("--")]
    if rest and not COMMANDS[known.command].keys:
        word, near = _nearest_option(rest, options)
        hint = f"did you mean `{near}`?" if near else f"`paceline {known.command} --help` lists what it takes"
        print(f"paceline {known.command}: there is no option `{word}`; {hint}", file=sys.stderr)
        return 2
    try:
        return known.run(known, rest) or 0
    except ConfigError as error:
        print(f"paceline: {error}", file=sys.stderr)
        word, near = _nearest_option(rest, options)
        if near:
            print(f"paceline: did you mean the option `{near}` instead of `{word}`?", file=sys.stderr)
        return 2
    except PacelineError as error:
        print(f"paceline: {restore_paths(error)}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "peft"):
            raise
        print("paceline: this computes with torch, which is not here: pip install 'paceline[torch]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("paceline: stopped", file=sys.stderr)
        return 130


def command() -> NoReturn:
    """Run `main` as the `paceline` executable."""
    raise_gc_thresholds()
    exit_process(main())


def _join_values(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """`--steps 5 quickstart` as `--steps=5 quickstart`: argparse, which knows no key, would take the 5 for the file."""
    joined: list[str] = []
    for word in argv:
        flag = joined[-1] if joined else ""
        value = not word.startswith("-") or word[1:2] in "0123456789."
        if value and flag.startswith("--") and flag not in parser._option_string_actions and _needs_value(flag):
            joined[-1] = f"{flag}={word}"
        else:
            joined.append(word)
    return joined


def _needs_value(flag: str) -> bool:
    """Whether a key of the run file needs a value; a boolean key does not."""
    spots = key_nodes(flag.removeprefix("--")) if "=" not in flag else []
    return bool(spots) and not any(bool in (spot.annotation, *get_args(spot.annotation)) for spot in spots)


def _nearest_option(rest: Sequence[str], options: Sequence[str]) -> tuple[str, str]:
    """A word that is no option, and the option that was probably meant, or ""."""
    for word in rest:
        flag = word.partition("=")[0]
        if flag.startswith("--") and (near := get_close_matches(flag, options, n=1, cutoff=0.8)):
            return flag, near[0]
    return rest[0] if rest else "", ""
