"""The `paceline` command line: parses the arguments and calls the function of the command."""

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn, get_args

from paceline.commands import policies, run_directories, run_files, serving  # noqa: F401 - they register their commands
from paceline.commands.commands import COMMANDS, CommandParsers, build_parser
from paceline.config import ConfigError
from paceline.config.keys import key_nodes
from paceline.errors import PacelineError
from paceline.observe.monitor.text import restore_paths
from paceline.util.gc_tuning import raise_gc_thresholds
from paceline.util.process_exit import exit_process

__all__ = ["command", "main"]

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
  paceline diff runs/a runs/b                              the first thing in which two runs differ
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


def command_parsers() -> CommandParsers:
    return build_parser(COMMAND_ORDER, EXAMPLES)


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
