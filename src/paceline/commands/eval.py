"""`paceline eval` and `export`: held-out tables of models and runs, and checkpoints as model folders."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.commands.commands import OVERRIDES, Commands
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.commands.evaluations import Estimate, Evaluation


EXPORTING = """
Writes the policy of a run's newest checkpoint, or of a step's, as a Hugging Face folder that transformers, peft, vLLM
and `paceline serve` load. The run may be finished, killed or still training; its checkpoint may be one file or the
shards of many ranks. Weights keep the type of the model the run began from.

examples:
  paceline export runs/quickstart                          runs/quickstart/export, as the end of the run writes it
  paceline export runs/quickstart@30 -o best-model         the checkpoint of step 30
  paceline export runs/my-lora --adapter -o my-adapter     the LoRA adapter alone, in peft's form
  paceline export runs/my-lora --merged --dtype bfloat16 -o merged
"""


def add_export(commands: Commands) -> None:
    export = commands.add("export", _export, "Write the policy of a run's checkpoint as a model folder.", EXPORTING)
    export.add_argument("directory", metavar="RUN[@STEP]", help="run directory, perhaps with the step of a checkpoint")
    export.add_argument("-o", "--output", metavar="FOLDER", help="where to (RUN/export, or RUN/export-STEP)")
    form = export.add_mutually_exclusive_group()
    form.add_argument("--merged", action="store_true", help="merged weights alone, no adapter beside them")
    form.add_argument("--adapter", action="store_true", help="the LoRA adapter alone")
    export.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="type of the weights (the source's)"
    )
    export.add_argument("--overwrite", action="store_true", help="replace a folder that holds files")


def _export(known: argparse.Namespace, rest: list[str]) -> int:
    from paceline.commands.exporting import ExportOptions, export_run
    from paceline.commands.targets import find_run

    target = find_run(known.directory)
    if target is None:
        raise PacelineError(
            f"{known.directory} is no run directory: name one, such as runs/quickstart or runs/quickstart@20"
        )
    options = ExportOptions(
        folder=Path(known.output) if known.output else None,
        form="merged" if known.merged else "adapter" if known.adapter else "all",
        dtype=known.dtype,
        overwrite=known.overwrite,
    )
    print(f"{export_run(target, options)}: step {target.step} of {target.root}")
    return 0


EVALUATING = (
    """
Plays held-out rows as the evaluations of a run do, with the same noise: `paceline eval RUN` finds what the run's last
evaluation found. Several targets are played on the same rows and shown side by side, with 95% intervals over rows.

examples:
  paceline eval runs/quickstart                            a run's newest checkpoint, on its own environments
  paceline eval runs/quickstart@30 runs/quickstart         two checkpoints, side by side
  paceline eval my-run.toml --samples 8                    a run file's model before training, with pass@k
  paceline eval quickstart                                 an example of the package, likewise
  paceline eval runs/a runs/b paceline:quickstart          two runs, and the model they began from
  paceline eval ./my-model --env gsm8k --dataset gsm8k/test.jsonl --examples 200
  paceline eval ./my-model --file my-run.toml --sampling.temperature 0 --json
"""
    + OVERRIDES
)

LABELS = {"truncated_ratio": "cut off", "length": "tokens a reply", "truncated": "replies cut off"}


def add_eval(commands: Commands) -> None:
    eval_ = commands.add("eval", _eval, "Evaluate models, runs or run files on held-out rows.", EVALUATING)
    eval_.add_argument(
        "targets",
        nargs="+",
        metavar="TARGET",
        help="run file or example (quickstart), run directory (RUN@STEP), model folder or hub name",
    )
    eval_.add_argument("--env", metavar="TYPE", help="evaluate on this environment; its keys are flags (--dataset ...)")
    eval_.add_argument("--file", metavar="RUN.toml", help="evaluate on the environments of this run file")
    eval_.add_argument("--samples", type=int, metavar="N", help="episodes per example; above 1, pass@k is shown too")
    eval_.add_argument("--examples", type=int, metavar="N", help="only the first N held-out examples")
    eval_.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _eval(known: argparse.Namespace, overrides: list[str]) -> int:
    from paceline.commands.evaluations import evaluate_target, find_targets

    for key in ("samples", "examples"):
        if (value := getattr(known, key)) is not None:
            overrides = [*overrides, f"--eval.{key}", str(value)]
    targets = find_targets(known.targets, overrides, known.env, known.file)
    done = [evaluate_target(target, _progress(target.name)) for target in targets]
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if known.json:
        print(json.dumps({"targets": [evaluation.record() for evaluation in done]}))
    else:
        _show(done)
    return 0


def _progress(name: str) -> Callable[[str], None]:
    """One line that is written over in a terminal; elsewhere only the phases, without a line for each episode."""
    live, shown = sys.stderr.isatty(), set()

    def tell(phase: str) -> None:
        if live:
            print(f"\r\033[K{name}: {phase}", end="", file=sys.stderr, flush=True)
        elif (kind := phase.rpartition(" ")[0]) not in shown:
            shown.add(kind)
            print(f"{name}: {kind if '/' in phase.rpartition(' ')[2] else phase}", file=sys.stderr, flush=True)

    return tell


def _show(done: "list[Evaluation]") -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for name in dict.fromkeys(name for evaluation in done for name in evaluation.tables):
        tables = [evaluation.tables.get(name, {}) for evaluation in done]
        table = Table(
            box=SIMPLE, pad_edge=False, title=f"{name}, held-out rows", title_justify="left", title_style="bold"
        )
        table.add_column("", no_wrap=True)
        for evaluation in done:
            table.add_column(evaluation.target.name, justify="right", overflow="fold")
        for key in dict.fromkeys(key for own in tables for key in own):
            table.add_row(LABELS.get(key, key), *(_cell(own.get(key)) for own in tables))
        console.print(table)


def _cell(value: "Estimate | None") -> str:
    from paceline.observe.monitor.text import score

    if value is None:
        return "-"
    if value.low is None or value.high is None:
        return f"{value.mean:.0f}"
    return f"{score(value.mean)} [{score(value.low, 2)}, {score(value.high, 2)}]"
