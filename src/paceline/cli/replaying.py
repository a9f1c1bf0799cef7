"""A recorded batch, once more."""

import argparse
import sys
from pathlib import Path

from paceline.cli.commands import OVERRIDES, Commands
from paceline.config import Loaded, load
from paceline.errors import PacelineError
from paceline.parent import end_with_parent

REPLAY = (
    """
The samples of a step are read from the record, or from batches/ where `record.batches` says how many are kept there.
Replaying takes the weights of the newest checkpoint from before the step; with `checkpoint.every = 1` these are the
very weights it began with.

examples:
  paceline replay runs/quickstart 40                       every component of the loss, recorded and replayed
  paceline replay runs/quickstart 40 --trainer.loss.type ppo     what another loss would have said
  paceline replay runs/quickstart 40 --json                the same, and what each token contributes
  paceline replay runs/quickstart --dump 12                a batch whose step was left out, sample by sample
"""
    + OVERRIDES
)


def add_replay(commands: Commands) -> None:
    replay = commands.add(
        "replay", _replay, "Train a recorded batch once more on the CPU, beside what was recorded.", REPLAY
    )
    replay.add_argument("directory", metavar="RUN", help="run directory, such as runs/quickstart")
    replay.add_argument("step", type=int, metavar="STEP", nargs="?", help="which of its batches")
    replay.add_argument("--dump", metavar="STEP", help="a batch kept because its step was bad: step or path")
    replay.add_argument("--json", action="store_true", help="one JSON object with every token's share of the loss")


def _replay(known: argparse.Namespace, overrides: list[str]) -> int:
    end_with_parent()
    run = Path(known.directory)
    file = run / "config.toml"
    if not file.is_file():
        raise PacelineError(f"there is no run at {run}: name a run directory, such as runs/quickstart")
    loaded = load(str(file), overrides)
    from rich.console import Console

    from paceline.cluster.replay import replay, replay_dump, samples_table, table

    if (known.step is None) == (known.dump is None):
        raise PacelineError("name one batch: a STEP whose batch was recorded, or --dump with one whose step was bad")
    if known.json:
        return _replay_json(run, known, loaded)
    dumped = known.dump is not None
    result = replay_dump(run, known.dump, loaded.config) if dumped else replay(run, known.step, loaded.config)
    console = Console()
    console.print(table(result))
    if dumped:
        console.print(samples_table(result))
        print(result.verdict)
    for remark in result.remarks:
        print(remark)
    note = "" if result.exact else f"; they are not those step {result.step} began with, so the figures differ"
    print(f"weights: {result.weights}{note}")
    return 0


def _replay_json(run: Path, known: argparse.Namespace, loaded: Loaded) -> int:
    from paceline.cluster.replay import replay
    from paceline.cluster.replay_json import as_json

    if known.dump is not None:
        raise PacelineError("--json tells of a STEP: leave --dump out")

    def telling(sentence: str) -> None:
        print(f"paceline: {sentence}", file=sys.stderr, flush=True)

    result = replay(run, known.step, loaded.config, telling)
    telling("writing what the tokens said")
    sys.stdout.buffer.write(as_json(run, result, loaded.config) + b"\n")
    return 0
