"""Commands that read a run directory: `doctor`, `top`, `report`, `diff`, `ui` and `replay`."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from paceline.commands.commands import OVERRIDES_HELP, RUN_ARGUMENT, arg, deprecated_option, flag, subcommand
from paceline.config import load
from paceline.config.errors import options_from_flags
from paceline.errors import PacelineError
from paceline.observe.analysis.text import format_number
from paceline.observe.record import open_run
from paceline.observe.record.curve_difference import CurveComparison, compare_curves
from paceline.observe.record.first_difference import RunComparison, compare
from paceline.util.child_process import end_with_parent


@subcommand(
    RUN_ARGUMENT,
    arg("step", type=int, metavar="STEP", nargs="?", help="which of its batches"),
    arg("--dump", metavar="STEP", help="a batch kept because its step was bad: step or path"),
    flag("--json", "one JSON object with every token's share of the loss"),
    keys=True,
    epilog=OVERRIDES_HELP,
)
def replay(known: argparse.Namespace, overrides: list[str]) -> None:
    """Train a recorded batch once more on the CPU, beside what was recorded.

    The samples of a step are read from the record, or from batches/ where `record.batches` says how many are kept
    there. Replaying takes the weights of the newest checkpoint from before the step; with `checkpoint.every = 1` these
    are the very weights it began with.

    examples:
      paceline replay runs/quickstart 40                       every component of the loss, recorded and replayed
      paceline replay runs/quickstart 40 --trainer.loss.type ppo     what another loss would have said
      paceline replay runs/quickstart 40 --json                the same, and what each token contributes
      paceline replay runs/quickstart --dump 12                a batch whose step was left out, sample by sample
    """
    end_with_parent()
    run = Path(known.directory)
    file = run / "config.toml"
    if not file.is_file():
        raise PacelineError(f"there is no run at {run}: name a run directory, such as runs/quickstart")
    config = load(str(file), overrides).config
    from paceline.commands.replay import as_json, loss_table, replay, replay_dump, samples_table

    if (known.step is None) == (known.dump is None):
        raise PacelineError("name one batch: a STEP whose batch was recorded, or --dump with one whose step was bad")
    if known.json:
        if known.dump is not None:
            raise PacelineError("--json tells of a STEP: leave --dump out")

        def progress(sentence: str) -> None:
            print(f"paceline: {sentence}", file=sys.stderr, flush=True)

        result = replay(run, known.step, config, progress)
        progress("writing what the tokens said")
        sys.stdout.buffer.write(as_json(run, result, config) + b"\n")
        return
    dumped = known.dump is not None
    result = replay_dump(run, known.dump, config) if dumped else replay(run, known.step, config)
    console = Console()
    console.print(loss_table(result))
    if dumped:
        console.print(samples_table(result))
        print(result.verdict)
    for remark in result.remarks:
        print(remark)
    note = "" if result.exact else f"; they are not those step {result.step} began with, so the figures differ"
    print(f"weights: {result.weights}{note}")


@subcommand(RUN_ARGUMENT)
def doctor(known: argparse.Namespace, rest: list[str]) -> None:
    """Show how a run is: alive or dead, who waits for whom, how to go on.

    Reads the run directory alone, so it works beside a living run and after one was killed: does it live, when did
    something last move, who waits for whom since when and at which line, the last events, the newest whole checkpoint
    and the command that goes on from it.

    examples:
      paceline doctor runs/quickstart                          how is it?
      watch -n 2 paceline doctor runs/quickstart               and again every two seconds
      paceline doctor runs/quickstart > report.txt             plain text, to send to a colleague
    """
    from paceline.observe.monitor.doctor import diagnose, render_findings, resume_command
    from paceline.observe.record.advice.rules import advice

    # A pipe has no width: wide enough there that no path and no line of a stack is broken.
    console = Console(width=None if sys.stdout.isatty() else 4000)
    found = diagnose(Path(known.directory))
    console.print(render_findings(found))
    console.print(advice(open_run(known.directory)))
    if command := resume_command(found):
        print(f"to go on: {command}")  # to be copied: in one line, however long


@subcommand(arg("directory", metavar="RUN", nargs="?", default="runs", help="run directory, or a folder of runs"))
def top(known: argparse.Namespace, rest: list[str]) -> None:
    """Watch a run in a terminal: its reward, speed and warnings.

    Looks at the run directory each second, so it works beside a living run, over ssh, and after one was killed. Keys: q
    leaves, j and k go from run to run, t changes the theme, ? explains. Into a pipe it prints one plain picture.

    examples:
      paceline top runs/quickstart                             one run
      paceline top runs                                        all runs of a folder, the newest first
      paceline top runs/quickstart | mail -s "how it is" me    one picture, as text
    """
    from paceline.observe.terminal import watch

    watch(Path(known.directory))


@subcommand(
    RUN_ARGUMENT,
    arg("-o", dest="file", metavar="FILE", help="where to (NAME-report.html, here)"),
    arg("--rollouts", type=int, default=2, metavar="N", help="best, median and worst ones, each (2)"),
)
def report(known: argparse.Namespace, rest: list[str]) -> None:
    """Write one HTML file about a run, to send to a colleague.

    Writes one HTML file that needs nothing else: no network, no script. It holds what the run directory tells: how it
    went, the curves, what the run file changed, what speaks against it, and a few rollouts as conversations. Every
    reader of the file sees these conversations and settings.

    examples:
      paceline report runs/quickstart                          quickstart-report.html, here
      paceline report runs/quickstart -o /tmp/for-anna.html --rollouts 5
      paceline report runs/quickstart --rollouts 0             no conversations
    """
    from paceline.observe.report import write_report

    file = write_report(Path(known.directory), known.file and Path(known.file), known.rollouts)
    print(f"{file} ({file.stat().st_size / 1e6:.2f} MB)")


@subcommand(
    arg("one", metavar="A", help="a run directory"),
    arg("other", metavar="B", help="another"),
    flag("--exact", "find the first difference bit by bit instead"),
    arg("--tolerance", type=float, help="as --exact, but numbers this far apart count as the same"),
    flag("--json", "one JSON object instead of tables"),
)
def diff(known: argparse.Namespace, rest: list[str]) -> int:
    """Show in what two runs differ: their settings, then their curves.

    Lists the settings that differ, says whether the runs can be equal bit for bit at all, and compares their curves: a
    metric differs where it is further apart than chance explains. With --exact it walks through both records in the
    order in which one thing leads to the next (a row of the data, a prompt, weights, a sampled token, a reward, credit,
    the loss, the gradient) and stops at the first difference. Times are not compared. Exits with 1 if there is a
    difference. Runs that are to be equal bit for bit need `deterministic = true` and `staleness = 0`.

    examples:
      paceline diff runs/a runs/b                              do they differ by more than chance?
      paceline diff runs/a runs/b --exact                      on one machine: equal to the last bit, or not
      paceline diff runs/cpu runs/gpu --tolerance 1e-3         on two: leave rounding out
    """
    one, other = open_run(known.one), open_run(known.other)
    if known.exact or known.tolerance is not None:
        compared = compare(one, other, known.tolerance or 0.0)
        differs = compared.first is not None
    else:
        compared = compare_curves(one, other)
        differs = bool(compared.real)
    if known.json:
        print(json.dumps(compared.as_json()))
    else:
        Console().print(comparison_report(compared, one.name, other.name))
    return int(differs)


@subcommand(
    arg("runs", metavar="RUNS", nargs="?", help="folder of run directories, or one of them (runs)"),
    arg("--host", help="address to listen on (127.0.0.1)"),
    arg("--port", type=int, help="port; 0 picks a free one and prints it (8200)"),
    arg("--api-key", "--token", help="what a browser must know; off loopback one is made (env PACELINE_UI_KEY)"),
    arg("--root-path", help="path below which a reverse proxy shows it, such as /paceline"),
    deprecated_option("--key", "--api-key"),
)
def ui(known: argparse.Namespace, rest: list[str]) -> None:
    """Look at runs in a browser, live.

    Shows runs in a browser, live and after they ended or died; reads nothing but their directories. Opens no browser:
    it prints the address. Other machines need a key: given, or made and printed with the address.

    examples:
      paceline ui                                              the folder `runs`, at http://127.0.0.1:8200/
      paceline ui runs/quickstart --port 0                     one run, at a free port
      paceline ui --host 0.0.0.0                               for other machines; the address has a key
      PACELINE_UI_KEY=KEY paceline ui --root-path /paceline    behind a reverse proxy; the page asks for the key
    """
    from paceline.observe.web import KEY_VARIABLE, UiOptions, serve_ui

    key = known.api_key or os.environ.get(KEY_VARIABLE) or None
    flags = {"runs": known.runs, "host": known.host, "port": known.port, "key": key, "root_path": known.root_path}
    serve_ui(options_from_flags(UiOptions, flags))


MOST_SETTINGS = 20
"""Settings that are listed."""


def comparison_report(compared: RunComparison | CurveComparison, one: str, other: str) -> RenderableType:
    """A report of what differs between two runs: their settings, whether bits may differ, then what was found."""
    parts: list[RenderableType] = []
    if compared.settings:
        columns = [Column(heading, overflow="fold") for heading in ("key", one, other)]
        table = Table(*columns, title="settings that differ", title_justify="left")
        for key, mine, theirs in compared.settings[:MOST_SETTINGS]:
            table.add_row(Text(key), Text(str(mine)), Text(str(theirs)))
        parts.append(table)
        if len(compared.settings) > MOST_SETTINGS:
            parts.append(Text(f"... and {len(compared.settings) - MOST_SETTINGS} more"))
    else:
        parts.append(Text("their settings are the same, but for the name"))
    if compared.expected:
        parts.append(
            Text(f"not deterministic, so bit differences are expected: {'; '.join(compared.expected)}", "yellow")
        )
    exact = isinstance(compared, RunComparison)
    parts += _first_difference(compared, one, other) if exact else _curve_differences(compared, one, other)
    parts += [Text(remark, "yellow") for remark in compared.remarks]
    return Group(*parts)


def _first_difference(compared: RunComparison, one: str, other: str) -> Iterator[RenderableType]:
    before = f"{compared.steps} steps and {compared.rollouts} rollouts"
    if compared.first is None:
        yield Text(f"the same in all that was recorded: {before}")
        return
    first, table = compared.first, Table(show_header=False)
    rows = [("what", first.what), ("where", first.where), (one, str(first.one)), (other, str(first.other))]
    if any(index is not None for index in first.indices):
        rows.append(("rollout", " and ".join("none" if at is None else str(at) for at in first.indices)))
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    yield Text(f"first difference, after {before} that are the same:", "bold")
    yield table


def _curve_differences(compared: CurveComparison, one: str, other: str) -> Iterator[RenderableType]:
    if compared.real:
        numbers = [
            Column(heading, justify="right", overflow="fold") for heading in (one, other, "difference", "chance, 95%")
        ]
        columns = [Column("metric", overflow="fold"), *numbers, Column("steps", justify="right")]
        table = Table(*columns, title="further apart than chance explains", title_justify="left")
        for curve in compared.real:
            figures = (curve.one, curve.other, curve.other - curve.one, curve.noise)
            steps = "-".join(map(str, dict.fromkeys(curve.steps)))
            table.add_row(Text(curve.name), *map(format_number, figures), steps)
        yield table
    rest = len(compared.curves) - len(compared.real)
    if rest:
        which = f"{rest} other metrics are" if compared.real else f"no difference: all {rest} metrics are"
        yield Text(f"{which} no further apart than chance explains")
