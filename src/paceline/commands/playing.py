"""Commands for episodes and games: `rollout`, `play` and `league`."""

import argparse
from dataclasses import fields
from pathlib import Path

from paceline.commands.commands import FILE, OVERRIDES, Commands, old_spelling
from paceline.config.target import load_target
from paceline.errors import PacelineError

ROLLOUTS = (
    """
examples:
  paceline rollout reverse-text -n 4                       a built-in environment, played by the tiny model
  paceline rollout my-run.toml --env tools --split eval    an environment of a run file, on held-out rows
  paceline rollout gsm8k --dataset gsm8k/train.jsonl --endpoint http://127.0.0.1:8000/v1
  paceline rollout my-run.toml --row 3 -n 8                one row, as a group would play it
  paceline rollout my-run.toml -n 1 --raw                  the prompt as the template renders it, special tokens and all
  paceline rollout my-run.toml --json | jq .reward         one JSON object a rollout
"""
    + OVERRIDES
)

PLAY = (
    """
You hear what the policy would hear in your seat and type what it would say; it plays all other seats. An environment
with one seat is yours alone: so one learns what the policy sees. Lines may be piped in, too.

examples:
  paceline play arenas/kuhn_poker                          against the tiny model, from the first seat
  paceline play my-run.toml --seat o --model runs/my-run/export          against what a run has made of it
  paceline play my-run.toml --model runs/my-run/checkpoints/latest       or against a checkpoint of this run file
  paceline play my-run.toml --endpoint http://127.0.0.1:8000/v1          or whatever any endpoint serves
  paceline play reverse-text --split eval -n 10            a built-in environment, alone

a line that ends in \\ goes on in the next; Ctrl-D or Ctrl-C ends the game and shows the score.
"""
    + OVERRIDES
)


def add_rollout(commands: Commands) -> None:
    rollout = commands.add("rollout", _rollout, "Play episodes of an environment and look at them.", ROLLOUTS)
    rollout.add_argument("target", help=FILE)
    rollout.add_argument("-n", "--count", type=int, default=4, help="episodes (4)")
    rollout.add_argument("--env", help="the environment's name, where the run file has several")
    rollout.add_argument("--split", choices=["train", "eval"], default="train")
    rollout.add_argument("--row", type=int, help="play all episodes on this row")
    rollout.add_argument("--endpoint", help="base URL of any OpenAI-compatible server, instead of the run's model")
    rollout.add_argument("--endpoint-model", help="the model's name there (the first it lists)")
    rollout.add_argument("--api-key", help="what the endpoint wants to be sent")
    rollout.add_argument("--concurrency", type=int, default=8, help="episodes at once (8)")
    rollout.add_argument("--json", action="store_true", help="print one JSON object a rollout, one line each")
    rollout.add_argument("--raw", action="store_true", help="show each prompt exactly as the model sees it")
    rollout.add_argument("--ids", action="store_true", help="with --json: token ids and log probabilities, too")


def _rollout(known: argparse.Namespace, overrides: list[str]) -> int:
    from paceline.commands.rollouts import RolloutOptions, rollouts

    loaded = load_target(known.target, overrides)
    return rollouts(loaded.config, RolloutOptions(**{f.name: getattr(known, f.name) for f in fields(RolloutOptions)}))


def add_play(commands: Commands) -> None:
    play = commands.add("play", _play, "Play an environment yourself, against the policy or alone.", PLAY)
    play.add_argument("target", help=FILE)
    play.add_argument("--env", help="the environment's name, where the run file has several")
    play.add_argument("--seat", metavar="ACTOR", help="who you are (the first actor)")
    play.add_argument("-n", "--count", type=int, help="games (until you leave)")
    play.add_argument("--split", choices=["train", "eval"], default="train")
    play.add_argument("--row", type=int, help="play every game on this row")
    play.add_argument("--endpoint", help="base URL of any OpenAI-compatible server that plays the others")
    play.add_argument("--endpoint-model", help="the model's name there (the first it lists)")
    play.add_argument("--model", help="folder, hub name or checkpoint instead of the run's model")
    play.add_argument("--api-key", help="what the endpoint wants to be sent")
    play.add_argument("--reveal", action="store_true", help="after each game, show what the others heard and said")
    old_spelling(play, "--url", "--endpoint")
    old_spelling(play, "--games", "--count", int)


def _play(known: argparse.Namespace, overrides: list[str]) -> int:
    from paceline.commands.play import PlayOptions, play

    if known.endpoint_model and known.model:
        raise PacelineError("--endpoint-model names a model of the endpoint, --model one to load: give one of them")
    names = ("env", "seat", "split", "row", "api_key", "reveal")
    options = PlayOptions(
        **{name: getattr(known, name) for name in names},
        games=known.count,
        url=known.endpoint,
        model=known.endpoint_model or known.model,
    )
    return play(load_target(known.target, overrides).config, options)


LEAGUE = """
examples:
  paceline train arenas/tic_tac_toe                        a run with a league: its past versions as opponents
  paceline league runs/tic-tac-toe                         who beats whom among them, as a table and a picture
"""


def add_league(commands: Commands) -> None:
    league = commands.add("league", _league, "Show ratings and payoff matrix of a self-play run.", LEAGUE)
    league.add_argument("directory", metavar="RUN", help="run directory, such as runs/tic-tac-toe")


def _league(known: argparse.Namespace, rest: list[str]) -> int:
    from rich.console import Console

    from paceline.runtime.league import leagues, picture

    run = Path(known.directory)
    found = leagues(run)
    if not found:
        raise PacelineError(f"{run} has no league: add [env.league] to an arena and evaluate (eval.every)")
    for name, payoff in found.items():
        Console().print(payoff.table(name))
        print(picture(run, name, payoff))
    return 0
