"""Commands for run files: `init`, `train`, `ab`, `check`, `data`, `config` and `schema`."""

import argparse
import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console

from paceline.commands import commands as cli
from paceline.commands.commands import FILE_HELP, OVERRIDES_HELP, arg, flag, subcommand
from paceline.config import LoadedConfig, dump, schema
from paceline.config.keys import ConfigTable, find_tables, key_schema, tables
from paceline.config.load import example_names
from paceline.config.target import KINDS, load_arms, load_target, write_starter
from paceline.errors import PacelineError
from paceline.util.interrupts import interrupt_ends_process
from paceline.util.user_code import trace_to_print


@subcommand(
    arg(
        "kind", metavar="KIND", nargs="?", default="quickstart", help=f"{', '.join(KINDS)}; or any example (quickstart)"
    ),
    flag("--list", "list the kinds and the examples, and write nothing"),
    arg("--name", help="name of the run and of its file (the kind)"),
    arg("--to", metavar="FOLDER", default="", help="where to (here)"),
    flag("--force", "replace files that exist"),
)
def init(known: argparse.Namespace, rest: list[str]) -> None:
    """Write a run file, and the files it needs, to begin with.

    Writes a commented run file and, where one is needed, a Python file and rows, side by side. Change them and train.

    examples:
      paceline init --list                                     what there is to begin with
      paceline init reward                                     reward.toml, reward.py and rows, here
      paceline init env --name my-task --to my-task            my-task.toml and its files, in a folder of their own
      paceline init algorithms/gae                             any example of the package
    """
    if known.list:
        for kind, (_, text) in KINDS.items():
            print(f"{kind:12} {text}")
        print("\n" + textwrap.fill(f"or any example: {', '.join(example_names())}", 100, break_on_hyphens=False))
        return
    files = write_starter(known.kind, Path(known.to), known.name, known.force)
    file = shlex.quote(os.fspath(files[0]))
    print("wrote", ", ".join(map(str, files)))
    print("next:")
    print(f"  paceline rollout {file} -n 2     look at episodes before training")
    print(f"  paceline check {file}            every key, and whether it fits this machine")
    print(f"  paceline train {file}")


@subcommand(
    arg("file", help=FILE_HELP),
    flag("--overwrite", "replace a run of the same name"),
    flag("--quiet", "show nothing but the summary"),
    keys=True,
    epilog=cli.common_keys() + OVERRIDES_HELP,
)
def train(known: argparse.Namespace, overrides: list[str]) -> int:
    """Train a policy as the run file says.

    examples:
      paceline train quickstart                                an example of the package, from any folder
      paceline train my-run.toml --steps 200 --seed 3          a run file of your own, with two keys set
      paceline train runs/my-run --resume latest --steps 400   go on, up to step 400; the run may have been moved
      paceline train reverse-text --name words                 an environment's type, with every default
    """
    loaded = load_target(known.file, overrides)
    if os.environ.get("RANK", "0") == "0":  # of the ranks of a torchrun one is enough to speak
        cli.show_warnings(loaded)
    with interrupt_ends_process():
        from paceline.runtime import train

    result = train(loaded.config, overwrite=known.overwrite, screen=None if known.quiet else sys.stdout)
    if result.summary:
        print("\n".join(result.summary))
    if result.outcome.status == "failed":
        print(f"paceline: {result.outcome.message}", file=sys.stderr)
        if shown := trace_to_print(result.outcome.frames, result.outcome.trace):
            print(shown, file=sys.stderr)
    return {"finished": 0, "failed": 1, "interrupted": 130}[result.outcome.status]


@subcommand(
    arg("file", help=FILE_HELP),
    flag("--overwrite", "replace runs of the same names"),
    flag("--until-real", "end as soon as the difference is beyond doubt"),
    keys=True,
)
def ab(known: argparse.Namespace, overrides: list[str]) -> int:
    """Train two ways side by side, and say when their difference is real.

    Trains two adapters on one engine, over the same draws with the same noise, and says when their difference is real:
    however often one looks, equals are told apart in at most one of twenty comparisons. Both leave a run directory,
    NAME-a and NAME-b; `paceline ui` shows them side by side. What is compared is the reward of the training draws, and
    after each evaluation that of the held-out rows, for this seed.

    examples:
      paceline ab quickstart --model.lora.rank 8 --b.env.0.algo.type max_rl
      paceline ab my-run.toml --a.trainer.optimizer.lr 1e-5 --b.trainer.optimizer.lr 3e-5 --until-real
      paceline ab my-run.toml --b.env.0.kwargs.length_penalty 0.1        another reward

    keys behind --a. or --b. are one arm's alone; any other is set for both:
      --steps 200   --b.trainer.loss.type cispo
    """
    arms = load_arms(known.file, overrides)
    for loaded in arms.values():
        cli.show_warnings(loaded)
    from paceline.commands.ab import train_arms

    configs = {arm: loaded.config for arm, loaded in arms.items()}
    return train_arms(configs, overwrite=known.overwrite, screen=sys.stdout, until_real=known.until_real)


@subcommand(
    arg("file", help=f"{FILE_HELP}; a run directory's plan is compared with its metrics"),
    arg("--hardware", metavar="GPUS", help="plan for these instead of this machine, such as h200x8"),
    arg("--memory", metavar="SIZE", help="of each device, such as 24GB"),
    arg("--prompt-tokens", type=int, metavar="N", help="tokens of an average prompt (128)"),
    arg("--reply-tokens", type=int, metavar="N", help="tokens of an average reply (half of max_tokens)"),
    flag("--json", "print the plan alone, as JSON"),
    keys=True,
    epilog=OVERRIDES_HELP,
)
def check(known: argparse.Namespace, overrides: list[str]) -> None:
    """Validate a run file, and say what it needs and how long a step takes.

    Prints the run file with every key (standard output), then a plan of memory and time (standard error), then whatever
    `train` would refuse: models, tokenizers, datasets, import paths, packages. Loads no weights and runs no user code.

    examples:
      paceline check my-run.toml                               does it fit this machine, and who waits for whom?
      paceline check my-run.toml --hardware h200x8             the same for eight H200
      paceline check my-run.toml --hardware a100-80x2 --reply-tokens 2000 --json
      paceline check runs/quickstart                           what was planned, beside what was measured
    """
    if (Path(known.file) / "config.toml").is_file():
        from paceline.planner.compare import compare, comparison_report

        comparison = compare(Path(known.file))
        if known.json:
            print(json.dumps(comparison.table(), indent=2))
        else:
            Console(highlight=False).print(comparison_report(comparison))
        return
    loaded = load_target(known.file, overrides)
    if not known.json:
        print(dump(loaded.config, unset=True), end="", flush=True)
    cli.show_warnings(loaded)
    _show_plan(loaded, known)
    from paceline.runtime.preflight import PreflightError, check_contamination, preflight

    found = preflight(loaded.config, elsewhere=known.hardware is not None)
    if not found.problems:
        check_contamination(loaded.config, found)
    for note in found.notes:
        print(f"paceline: note: {note}", file=sys.stderr)
    if found.problems:
        raise PreflightError(found.problems)
    print(f"paceline: {known.file} is valid", file=sys.stderr)


def _show_plan(loaded: LoadedConfig, known: argparse.Namespace) -> None:
    from paceline.config.hardware import UnknownShape
    from paceline.planner.compare import plan_report
    from paceline.planner.hardware import found, parse, with_memory
    from paceline.planner.plan import predict
    from paceline.planner.shape import assumed, shape_of

    config = loaded.config
    hardware = parse(known.hardware) if known.hardware else found(config.device, backend=config.backend)
    hardware = with_memory(hardware, known.memory)
    try:
        shape = shape_of(config.model.name)
    except UnknownShape as reason:
        if known.json:
            raise
        print(f"paceline: no plan: {reason}", file=sys.stderr)
        return
    plan = predict(config, hardware, assumed(config, shape, known.prompt_tokens, known.reply_tokens), shape)
    if known.json:
        print(json.dumps(plan.table(), indent=2))
    else:
        Console(stderr=True, highlight=False).print(plan_report(plan))


@subcommand(
    arg("source", help="file or URI: .jsonl, .json, .csv, .parquet, .arrow, split@hub/name"),
    arg("-n", "--count", type=int, default=5, help="rows to show (5)"),
    cli.deprecated_option("--limit", "--count", int),
    arg("--model", default="paceline:quickstart", help="whose tokenizer and chat template"),
    arg("--field", action="append", default=[], metavar="THEIRS=OURS", help="rename a field; repeatable"),
    flag("--demonstrations", "rows must end in an assistant message"),
)
def data(known: argparse.Namespace, rest: list[str]) -> None:
    """Show dataset rows as the model will see them, with token counts.

    examples:
      paceline data rows.jsonl                                 the first rows, as the model will see them
      paceline data train.parquet --field question=prompt --field gt_answer=answer --model ./my-model
      paceline data demonstrations.jsonl --demonstrations      what would be trained, in green
    """
    import paceline.envs  # noqa: F401 - they bring schemes of their own, such as `reasoning-gym:`
    from paceline.commands.show import show_rows
    from paceline.config.model import ModelConfig
    from paceline.data import open_rows, skipped_rows
    from paceline.model import load_tokenizer

    wrong = [pair for pair in known.field if not all(pair.partition("="))]
    if wrong:
        raise PacelineError(f"--field {wrong[0]}: write THEIRS=OURS, such as --field question=prompt")
    fields = dict(pair.split("=", 1) for pair in known.field)
    rows = open_rows(known.source, fields, demonstrations=known.demonstrations)
    show_rows(rows, load_tokenizer(ModelConfig(name=known.model)), known.count, Console())
    for bad in skipped_rows(rows):
        print(f"paceline: {bad}", file=sys.stderr)


INTRODUCTION = """# Every key of the run file

<!-- Written by `paceline config --markdown > docs/config.md`: change the docstrings under the fields in
src/paceline/config/ and write it anew. -->

A run file holds only what differs from the defaults below. Any key can be set on the command line by its dotted path,
the elements of a list by their place or name: `--trainer.optimizer.lr 1e-4`, `--env.0.group_size 4`. `unset` keys may
be left out; what that means stands beside them. `paceline config KEY` shows a part of this page in a terminal, and
`paceline check FILE` a run file with all of its values."""


@subcommand(
    arg("key", nargs="?", default="", help="show this table or key alone, such as trainer.optimizer"),
    [flag("--json", "print the JSON schema of it"), flag("--markdown", "print it as docs/config.md has it")],
)
def config(known: argparse.Namespace, rest: list[str]) -> None:
    """List every key of the run file: default, type, meaning.

    examples:
      paceline config                                          every key
      paceline config trainer.optimizer                        one table
      paceline config env.gsm8k                                one kind of environment
      paceline config sampling.temperature                     one key
      paceline config trainer --json                           its JSON schema
      paceline config --markdown > docs/config.md              the page of the documentation
    """
    if known.json:
        print(json.dumps(key_schema(known.key), indent=2))
        return
    found = find_tables(known.key) if known.key else tables()
    width = min(shutil.get_terminal_size().columns, 100)
    print(config_markdown(found) if known.markdown else "\n".join(_config_lines(found, width)))


def config_markdown(found: Iterable[ConfigTable]) -> str:
    parts = [INTRODUCTION]
    for table in found:
        parts.append(f"## `{table.header}`" if table.path else "## Top of the file")
        if table.meaning:
            parts.append(table.meaning)
        if table.keys:
            rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
            for k in table.keys:
                words = k.default in ("unset", "required", "its own defaults")
                default = k.default if words else f"`{_escape_pipes(k.default)}`"
                rows.append(f"| `{k.name}` | {_escape_pipes(k.kind)} | {default} | {_escape_pipes(k.meaning)} |")
            parts.append("\n".join(rows))
    return "\n\n".join(parts)


def _escape_pipes(text: str) -> str:
    return text.replace("|", "\\|")


def _config_lines(found: Iterable[ConfigTable], width: int) -> Iterator[str]:
    for table in found:
        yield table.header
        yield from textwrap.wrap(table.meaning, width, initial_indent="# ", subsequent_indent="# ")
        for key in table.keys:
            yield f"  {key.name} = {key.default}   ({key.kind})"
            yield from textwrap.wrap(key.meaning, width, initial_indent="      ", subsequent_indent="      ")
        yield ""


@subcommand()
def schema_(known: argparse.Namespace, rest: list[str]) -> None:
    """Print the JSON schema of run files, for editors.

    examples:
      paceline schema > paceline.schema.json                   completion and help in your editor

    then, in the first line of a run file, for editors with a TOML language server:
      #:schema ./paceline.schema.json
    """
    print(json.dumps(schema(), indent=2))
