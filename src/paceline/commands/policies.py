"""Commands that run or write out a policy: `eval`, `export`, `rollout`, `play` and `league`."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from paceline.commands.commands import FILE_HELP, OVERRIDES_HELP, arg, deprecated_option, flag, subcommand
from paceline.config.target import load_target
from paceline.errors import PacelineError
from paceline.observe.monitor.text import format_score

if TYPE_CHECKING:
    from paceline.commands.evaluations import Estimate, Evaluation


@subcommand(
    arg("directory", metavar="RUN[@STEP]", help="run directory, perhaps with the step of a checkpoint"),
    arg("-o", "--output", metavar="FOLDER", help="where to (RUN/export, or RUN/export-STEP)"),
    [
        flag("--merged", "merged weights alone, no adapter beside them"),
        flag("--adapter", "the LoRA adapter alone"),
    ],
    arg("--dtype", choices=["float32", "bfloat16", "float16"], help="type of the weights (the source's)"),
    flag("--overwrite", "replace a folder that holds files"),
)
def export(known: argparse.Namespace, rest: list[str]) -> None:
    """Write the policy of a run's checkpoint as a model folder.

    Writes the policy of a run's newest checkpoint, or of a step's, as a Hugging Face folder that transformers, peft,
    vLLM and `paceline serve` load. The run may be finished, killed or still training; its checkpoint may be one file or
    the shards of many ranks. Weights keep the type of the model the run began from.

    examples:
      paceline export runs/quickstart                          runs/quickstart/export, as the end of the run writes it
      paceline export runs/quickstart@30 -o best-model         the checkpoint of step 30
      paceline export runs/my-lora --adapter -o my-adapter     the LoRA adapter alone, in peft's form
      paceline export runs/my-lora --merged --dtype bfloat16 -o merged
    """
    from paceline.commands.exporting import export_run
    from paceline.commands.targets import find_run

    target = find_run(known.directory)
    if target is None:
        raise PacelineError(
            f"{known.directory} is no run directory: name one, such as runs/quickstart or runs/quickstart@20"
        )
    folder = Path(known.output) if known.output else None
    form = "merged" if known.merged else "adapter" if known.adapter else "all"
    folder = export_run(target, folder, form, known.dtype, overwrite=known.overwrite)
    print(f"{folder}: step {target.step} of {target.root}")


LABELS = {"truncated_ratio": "cut off", "length": "tokens a reply", "truncated": "replies cut off"}


@subcommand(
    arg(
        "targets",
        nargs="+",
        metavar="TARGET",
        help="run file or example (quickstart), run directory (RUN@STEP), model folder or hub name",
    ),
    arg("--env", metavar="TYPE", help="evaluate on this environment; its keys are flags (--dataset ...)"),
    arg("--file", metavar="RUN.toml", help="evaluate on the environments of this run file"),
    arg("--samples", type=int, metavar="N", help="episodes per example; above 1, pass@k is shown too"),
    arg("--examples", type=int, metavar="N", help="only the first N held-out examples"),
    flag("--json", "print one JSON object instead of tables"),
    keys=True,
    epilog=OVERRIDES_HELP,
)
def eval_(known: argparse.Namespace, overrides: list[str]) -> None:
    """Evaluate models, runs or run files on held-out rows.

    Plays held-out rows as the evaluations of a run do, with the same noise: `paceline eval RUN` finds what the run's
    last evaluation found. Several targets are played on the same rows and shown side by side, with 95% intervals over
    rows.

    examples:
      paceline eval runs/quickstart                            a run's newest checkpoint, on its own environments
      paceline eval runs/quickstart@30 runs/quickstart         two checkpoints, side by side
      paceline eval my-run.toml --samples 8                    a run file's model before training, with pass@k
      paceline eval quickstart                                 an example of the package, likewise
      paceline eval runs/a runs/b paceline:quickstart          two runs, and the model they began from
      paceline eval ./my-model --env gsm8k --dataset gsm8k/test.jsonl --examples 200
      paceline eval ./my-model --file my-run.toml --sampling.temperature 0 --json
    """
    from paceline.commands.evaluations import evaluate_target, find_targets

    for key in ("samples", "examples"):
        if (value := getattr(known, key)) is not None:
            overrides = [*overrides, f"--eval.{key}", str(value)]
    targets = find_targets(known.targets, overrides, known.env, known.file)
    done = [evaluate_target(target, _progress_printer(target.name)) for target in targets]
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if known.json:
        print(json.dumps({"targets": [evaluation.as_json() for evaluation in done]}))
    else:
        _print_evaluations(done)


def _progress_printer(name: str) -> Callable[[str], None]:
    """One line that is written over in a terminal; elsewhere only the phases, without a line for each episode."""
    live, shown = sys.stderr.isatty(), set()

    def print_phase(phase: str) -> None:
        if live:
            print(f"\r\033[K{name}: {phase}", end="", file=sys.stderr, flush=True)
        elif (kind := phase.rpartition(" ")[0]) not in shown:
            shown.add(kind)
            print(f"{name}: {kind if '/' in phase.rpartition(' ')[2] else phase}", file=sys.stderr, flush=True)

    return print_phase


def _print_evaluations(done: "list[Evaluation]") -> None:
    console = Console(highlight=False)
    for name in dict.fromkeys(name for evaluation in done for name in evaluation.tables):
        tables = [evaluation.tables.get(name, {}) for evaluation in done]
        columns = [Column(evaluation.target.name, justify="right", overflow="fold") for evaluation in done]
        table = Table(Column(no_wrap=True), *columns, box=SIMPLE, pad_edge=False, title=f"{name}, held-out rows")
        table.title_justify, table.title_style = "left", "bold"
        for key in dict.fromkeys(key for own in tables for key in own):
            table.add_row(LABELS.get(key, key), *(_format_estimate(own.get(key)) for own in tables))
        console.print(table)


def _format_estimate(value: "Estimate | None") -> str:
    if value is None:
        return "-"
    if value.low is None or value.high is None:
        return f"{value.mean:.0f}"
    return f"{format_score(value.mean)} [{format_score(value.low, 2)}, {format_score(value.high, 2)}]"


TARGET_ARGUMENT = arg("target", help=FILE_HELP)
ENV_OPTION = arg("--env", help="the environment's name, where the run file has several")
SPLIT_OPTION = arg("--split", choices=["train", "eval"], default="train")
ENDPOINT_MODEL_OPTION = arg("--endpoint-model", help="the model's name there (the first it lists)")
API_KEY_OPTION = arg("--api-key", help="what the endpoint wants to be sent")


@subcommand(
    TARGET_ARGUMENT,
    arg("-n", "--count", type=int, default=4, help="episodes (4)"),
    ENV_OPTION,
    SPLIT_OPTION,
    arg("--row", type=int, help="play all episodes on this row"),
    arg("--endpoint", help="base URL of any OpenAI-compatible server, instead of the run's model"),
    ENDPOINT_MODEL_OPTION,
    API_KEY_OPTION,
    arg("--concurrency", type=int, default=8, help="episodes at once (8)"),
    flag("--json", "print one JSON object a rollout, one line each"),
    flag("--raw", "show each prompt exactly as the model sees it"),
    flag("--ids", "with --json: token ids and log probabilities, too"),
    keys=True,
    epilog=OVERRIDES_HELP,
)
def rollout(known: argparse.Namespace, overrides: list[str]) -> int:
    """Play episodes of an environment and look at them.

    examples:
      paceline rollout reverse-text -n 4                       a built-in environment, played by the tiny model
      paceline rollout my-run.toml --env tools --split eval    an environment of a run file, on held-out rows
      paceline rollout gsm8k --dataset gsm8k/train.jsonl --endpoint http://127.0.0.1:8000/v1
      paceline rollout my-run.toml --row 3 -n 8                one row, as a group would play it
      paceline rollout my-run.toml -n 1 --raw                  the prompt as the template renders it, special tokens and all
      paceline rollout my-run.toml --json | jq .reward         one JSON object a rollout
    """  # noqa: E501 - as wide as a terminal shows it
    from paceline.commands.rollouts import RolloutOptions, preview_rollouts

    config = load_target(known.target, overrides).config
    return preview_rollouts(config, RolloutOptions(**{f.name: getattr(known, f.name) for f in fields(RolloutOptions)}))


@subcommand(
    TARGET_ARGUMENT,
    ENV_OPTION,
    arg("--seat", metavar="ACTOR", help="who you are (the first actor)"),
    arg("-n", "--count", type=int, help="games (until you leave)"),
    SPLIT_OPTION,
    arg("--row", type=int, help="play every game on this row"),
    arg("--endpoint", help="base URL of any OpenAI-compatible server that plays the others"),
    ENDPOINT_MODEL_OPTION,
    arg("--model", help="folder, hub name or checkpoint instead of the run's model"),
    API_KEY_OPTION,
    flag("--reveal", "after each game, show what the others heard and said"),
    deprecated_option("--url", "--endpoint"),
    deprecated_option("--games", "--count", int),
    keys=True,
    epilog=OVERRIDES_HELP,
)
def play(known: argparse.Namespace, overrides: list[str]) -> int:
    """Play an environment yourself, against the policy or alone.

    You hear what the policy would hear in your seat and type what it would say; it plays all other seats. An
    environment with one seat is yours alone: so one learns what the policy sees. Lines may be piped in, too.

    examples:
      paceline play arenas/kuhn_poker                          against the tiny model, from the first seat
      paceline play my-run.toml --seat o --model runs/my-run/export          against what a run has made of it
      paceline play my-run.toml --model runs/my-run/checkpoints/latest       or against a checkpoint of this run file
      paceline play my-run.toml --endpoint http://127.0.0.1:8000/v1          or whatever any endpoint serves
      paceline play reverse-text --split eval -n 10            a built-in environment, alone

    a line that ends in \\ goes on in the next; Ctrl-D or Ctrl-C ends the game and shows the score.
    """
    from paceline.commands.play import PlayOptions, play

    options = PlayOptions(**{f.name: getattr(known, f.name) for f in fields(PlayOptions)})
    return play(load_target(known.target, overrides).config, options)


@subcommand(arg("directory", metavar="RUN", help="run directory, such as runs/tic-tac-toe"))
def league(known: argparse.Namespace, rest: list[str]) -> None:
    """Show ratings and payoff matrix of a self-play run.

    examples:
      paceline train arenas/tic_tac_toe                        a run with a league: its past versions as opponents
      paceline league runs/tic-tac-toe                         who beats whom among them, as a table and a picture
    """
    from paceline.runtime.league import leagues, save_picture

    run = Path(known.directory)
    found = leagues(run)
    if not found:
        raise PacelineError(f"{run} has no league: add [env.league] to an arena and evaluate (eval.every)")
    for name, payoff in found.items():
        Console().print(payoff.table(name))
        print(save_picture(run, name, payoff))
