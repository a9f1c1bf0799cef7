"""The commands, thin: each reads its arguments and calls one function."""

import argparse
import json
import sys
from collections.abc import Sequence

from paceline import __version__
from paceline.config import Loaded, dump, load, schema
from paceline.errors import PacelineError

OVERRIDES = """
any key of the run file can be set on the command line, by its dotted path:
  --staleness 2   --trainer.optimizer.lr 1e-4   --env.0.group_size 4   --deterministic
`paceline check FILE` prints every key with its value.
"""

EXAMPLES = """
examples:
  paceline train examples/quickstart.toml                  train the quickstart, about half a minute on a laptop
  paceline train examples/quickstart.toml --staleness 0    the same, sampling and training in turn
  paceline train runs/quickstart/config.toml --resume latest --steps 80
  paceline check my-run.toml                               is it valid, and what does it mean?
  paceline schema > paceline.schema.json                   completion and help in your editor
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The `paceline` command. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    if rest and known.command not in ("train", "check"):
        parser.error(f"unrecognised arguments: {' '.join(rest)}")
    try:
        return known.run(known, rest)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("paceline: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Reinforcement learning for language models, on a laptop as on a cluster.",
        epilog=EXAMPLES,
        formatter_class=plain,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run, text: str, epilog: str = "") -> argparse.ArgumentParser:  # noqa: ANN001
        sub = commands.add_parser(
            name, help=text, description=text, epilog=epilog, formatter_class=plain, allow_abbrev=False
        )
        sub.set_defaults(run=run)
        return sub

    train = command("train", _train, "Train a policy as the run file says.", OVERRIDES)
    train.add_argument("file", help="run file (TOML)")
    train.add_argument("--overwrite", action="store_true", help="replace a run of the same name")
    train.add_argument("--quiet", action="store_true", help="show nothing but the summary")
    check = command("check", _check, "Validate a run file and print it resolved; starts nothing.", OVERRIDES)
    check.add_argument("file", help="run file (TOML)")
    command("schema", _schema, "Print the JSON schema of run files, for editors.")
    return parser


def _train(known: argparse.Namespace, overrides: list[str]) -> int:
    loaded = load(known.file, overrides)
    _show_warnings(loaded)
    from paceline.cluster import train

    result = train(loaded.config, overwrite=known.overwrite, screen=None if known.quiet else sys.stdout)
    print("\n".join(result.summary))
    if result.outcome.status == "failed":
        print(f"paceline: {result.outcome.message}", file=sys.stderr)
    return {"finished": 0, "failed": 1, "interrupted": 130}[result.outcome.status]


def _check(known: argparse.Namespace, overrides: list[str]) -> int:
    loaded = load(known.file, overrides)
    print(dump(loaded.config), end="")
    _show_warnings(loaded)
    print(f"paceline: {known.file} is valid", file=sys.stderr)
    return 0


def _schema(known: argparse.Namespace, overrides: list[str]) -> int:
    print(json.dumps(schema(), indent=2))
    return 0


def _show_warnings(loaded: Loaded) -> None:
    for warning in loaded.warnings:
        print(f"paceline: warning: {warning}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
