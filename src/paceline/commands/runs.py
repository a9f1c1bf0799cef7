"""Commands for run files: `train`, `ab`, `check` and `schema`."""

import argparse
import json
import os
import sys
from pathlib import Path

from paceline.commands.commands import FILE, OVERRIDES, Commands, common_keys, show_warnings
from paceline.config import LoadedConfig, dump, schema
from paceline.config.target import arms_of, load_target
from paceline.util.interrupts import interrupt_ends_process
from paceline.util.user_code import to_show

COMPARING = """
Trains two adapters on one engine, over the same draws with the same noise, and says when their difference is real:
however often one looks, equals are told apart in at most one of twenty comparisons. Both leave a run directory, NAME-a
and NAME-b; `paceline ui` shows them side by side. What is compared is the reward of the training draws, for this seed.

examples:
  paceline ab quickstart --model.lora.rank 8 --b.env.0.algo.type max_rl
  paceline ab my-run.toml --a.trainer.optimizer.lr 1e-5 --b.trainer.optimizer.lr 3e-5 --until-real
  paceline ab my-run.toml --b.env.0.kwargs.length_penalty 0.1        another reward

keys behind --a. or --b. are one arm's alone; any other is set for both:
  --steps 200   --b.trainer.loss.type cispo
"""

CHECK = (
    """
Prints the run file with every key (standard output), then a plan of memory and time (standard error), then whatever
`train` would refuse: models, tokenizers, datasets, import paths, packages. Loads no weights and runs no user code.

examples:
  paceline check my-run.toml                               does it fit this machine, and who waits for whom?
  paceline check my-run.toml --hardware h200x8             the same for eight H200
  paceline check my-run.toml --hardware a100-80x2 --reply-tokens 2000 --json
  paceline check runs/quickstart                           what was planned, beside what was measured
"""
    + OVERRIDES
)


TRAINING = """
examples:
  paceline train quickstart                                an example of the package, from any folder
  paceline train my-run.toml --steps 200 --seed 3          a run file of your own, with two keys set
  paceline train runs/my-run --resume latest --steps 400   go on, up to step 400; the run may have been moved
  paceline train reverse-text --name words                 an environment's type, with every default
"""


def add_train(commands: Commands) -> None:
    train = commands.add("train", _train, "Train a policy as the run file says.", TRAINING + common_keys() + OVERRIDES)
    train.add_argument("file", help=FILE)
    train.add_argument("--overwrite", action="store_true", help="replace a run of the same name")
    train.add_argument("--quiet", action="store_true", help="show nothing but the summary")


def _train(known: argparse.Namespace, overrides: list[str]) -> int:
    loaded = load_target(known.file, overrides)
    if os.environ.get("RANK", "0") == "0":  # of the ranks of a torchrun one is enough to speak
        show_warnings(loaded)
    with interrupt_ends_process():
        from paceline.runtime import train

    result = train(loaded.config, overwrite=known.overwrite, screen=None if known.quiet else sys.stdout)
    if result.summary:
        print("\n".join(result.summary))
    if result.outcome.status == "failed":
        print(f"paceline: {result.outcome.message}", file=sys.stderr)
        if shown := to_show(result.outcome.frames, result.outcome.trace):
            print(shown, file=sys.stderr)
    return {"finished": 0, "failed": 1, "interrupted": 130}[result.outcome.status]


def add_ab(commands: Commands) -> None:
    ab = commands.add("ab", _ab, "Train two ways side by side, and say when their difference is real.", COMPARING)
    ab.add_argument("file", help=FILE)
    ab.add_argument("--overwrite", action="store_true", help="replace runs of the same names")
    ab.add_argument("--until-real", action="store_true", help="end as soon as the difference is beyond doubt")


def _ab(known: argparse.Namespace, overrides: list[str]) -> int:
    arms = arms_of(known.file, overrides)
    for loaded in arms.values():
        show_warnings(loaded)
    from paceline.commands.ab import compare

    return compare(
        {arm: loaded.config for arm, loaded in arms.items()},
        overwrite=known.overwrite,
        screen=sys.stdout,
        until_real=known.until_real,
    )


def add_check(commands: Commands) -> None:
    check = commands.add(
        "check", _check, "Validate a run file, and say what it needs and how long a step takes.", CHECK
    )
    check.add_argument("file", help=f"{FILE}; a run directory's plan is compared with its metrics")
    check.add_argument("--hardware", metavar="GPUS", help="plan for these instead of this machine, such as h200x8")
    check.add_argument("--memory", metavar="SIZE", help="of each device, such as 24GB")
    check.add_argument("--prompt-tokens", type=int, metavar="N", help="tokens of an average prompt (128)")
    check.add_argument("--reply-tokens", type=int, metavar="N", help="tokens of an average reply (half of max_tokens)")
    check.add_argument("--json", action="store_true", help="print the plan alone, as JSON")


def _check(known: argparse.Namespace, overrides: list[str]) -> int:
    if (Path(known.file) / "config.toml").is_file():
        return _compare(known)
    loaded = load_target(known.file, overrides)
    if not known.json:
        print(dump(loaded.config, unset=True), end="", flush=True)
    show_warnings(loaded)
    _show_plan(loaded, known)
    from paceline.runtime.preflight import PreflightError, preflight

    found = preflight(loaded.config, elsewhere=known.hardware is not None)
    for note in found.notes:
        print(f"paceline: note: {note}", file=sys.stderr)
    if found.problems:
        raise PreflightError(found.problems)
    print(f"paceline: {known.file} is valid", file=sys.stderr)
    return 0


def _show_plan(loaded: LoadedConfig, known: argparse.Namespace) -> None:
    from rich.console import Console

    from paceline import planner
    from paceline.config.hardware import UnknownShape
    from paceline.planner.compare import plan_report
    from paceline.planner.shape import shape_of
    from paceline.planner.work import assumed

    config = loaded.config
    hardware = planner.parse(known.hardware) if known.hardware else planner.found(config.device, backend=config.backend)
    hardware = planner.with_memory(hardware, known.memory)
    try:
        shape = shape_of(config.model.name)
    except UnknownShape as reason:
        if known.json:
            raise
        print(f"paceline: no plan: {reason}", file=sys.stderr)
        return
    plan = planner.predict(config, hardware, assumed(config, shape, known.prompt_tokens, known.reply_tokens), shape)
    if known.json:
        print(json.dumps(plan.table(), indent=2))
    else:
        Console(stderr=True, highlight=False).print(plan_report(plan))


def _compare(known: argparse.Namespace) -> int:
    from rich.console import Console

    from paceline.planner import compare
    from paceline.planner.compare import comparison_report

    comparison = compare(Path(known.file))
    if known.json:
        print(json.dumps(comparison.table(), indent=2))
    else:
        Console(highlight=False).print(comparison_report(comparison))
    return 0


SCHEMA = """
examples:
  paceline schema > paceline.schema.json                   completion and help in your editor

then, in the first line of a run file, for editors with a TOML language server:
  #:schema ./paceline.schema.json
"""


def add_schema(commands: Commands) -> None:
    commands.add("schema", _schema, "Print the JSON schema of run files, for editors.", SCHEMA)


def _schema(known: argparse.Namespace, overrides: list[str]) -> int:
    print(json.dumps(schema(), indent=2))
    return 0
