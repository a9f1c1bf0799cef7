"""The `paceline` command."""

import argparse
import sys
from collections.abc import Sequence

from paceline.cli.commands import Commands
from paceline.cli.looking import add_diff, add_doctor, add_report, add_top, add_ui
from paceline.cli.machines import add_down, add_status, add_up
from paceline.cli.playing import add_league, add_play, add_rollout
from paceline.cli.replaying import add_replay
from paceline.cli.rows import add_data
from paceline.cli.runs import add_ab, add_check, add_schema, add_train
from paceline.cli.serving import add_search, add_serve
from paceline.errors import PacelineError

EXAMPLES = """
examples:
  paceline train examples/quickstart.toml                  train the quickstart, about half a minute on a laptop
  paceline train examples/quickstart.toml --staleness 0    the same, sampling and training in turn
  paceline train runs/quickstart/config.toml --resume latest --steps 80
  paceline check my-run.toml                               is it valid, does it fit, how long is a step?
  paceline rollout reverse-text -n 4                       look at episodes before training
  paceline play examples/arenas/kuhn_poker.toml            take a seat yourself, against the policy
  paceline league runs/tic-tac-toe                         who beats whom among the versions of a self-play run
  paceline data rows.jsonl                                 look at rows as the model will see them
  paceline replay runs/quickstart 40                       a recorded batch's loss once more, component by component
  paceline doctor runs/quickstart                          does it live, who waits for whom, how to go on
  paceline top runs/quickstart                             watch it in a terminal
  paceline report runs/quickstart                          one HTML file to send to a colleague
  paceline ui                                              look at all runs in a browser, live
  paceline diff runs/a runs/b                              the first thing in which two runs differ
  paceline ab my-run.toml --b.env.0.algo.type max_rl       which of two ways is better, and is it sure?
  paceline serve paceline:quickstart                       a model behind the OpenAI API
  paceline schema > paceline.schema.json                   completion and help in your editor
"""

IN_ORDER = (
    add_train,
    add_ab,
    add_check,
    add_serve,
    add_rollout,
    add_up,
    add_status,
    add_down,
    add_play,
    add_league,
    add_replay,
    add_doctor,
    add_top,
    add_report,
    add_diff,
    add_ui,
    add_data,
    add_search,
    add_schema,
)
"""As `paceline --help` lists them."""
WITH_KEYS = ("train", "ab", "check", "serve", "rollout", "play", "replay")
"""Those whose other arguments are keys of the run file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The `paceline` command. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    parser = the_parser()
    known, rest = parser.parse_known_args(arguments)
    if rest and known.command not in WITH_KEYS:
        parser.error(f"unrecognised arguments: {' '.join(rest)}")
    try:
        return known.run(known, rest)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "peft"):
            raise
        print("paceline: this computes with torch, which is not here: pip install 'paceline[torch]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("paceline: stopped", file=sys.stderr)
        return 130


def the_parser() -> argparse.ArgumentParser:
    commands = Commands(EXAMPLES)
    for add in IN_ORDER:
        add(commands)
    return commands.parser
