"""Renders advisories for a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.record.advice.advisory import Advisory
from paceline.record.advice.rules import advise
from paceline.record.advice.window import AdviceWindow, sight_of
from paceline.record.folder import RunFolder


def advice(run: RunFolder) -> RenderableType:
    """The advisories of a run."""
    sight = sight_of(run)
    found = advise(sight)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    for advisory in found:
        _add(table, advisory)
    return Group(Text(), Text("advice", "bold"), table if found else Text(silence(sight)))


def silence(sight: AdviceWindow) -> str:
    """Why nothing is said."""
    if not sight.trained:
        return "no step has trained yet"
    if not sight.config:
        return "config.toml is another version's: only what concerns the whole run was looked at, and nothing was found"
    if not sight.whole:
        return "the run keeps no record (record.all): only its metrics were looked at, and nothing was found"
    return f"nothing to say about the last {sight.trained} steps"


def _add(table: Table, advisory: Advisory) -> None:
    first, last = advisory.steps
    table.add_row(Text(advisory.rule, "yellow"), Text(advisory.title, "bold"))
    table.add_row("seen", Text(f"{advisory.seen} (steps {first} to {last})"))
    table.add_row("how sure", Text(advisory.sure))
    if advisory.caution:
        table.add_row("but", Text(advisory.caution))
    for knob in advisory.knobs:
        table.add_row("turn", Text(f"{knob.flag}   {knob.why}" + ("" if knob.now is None else f" (now {knob.now})")))
    if advisory.rollouts:
        table.add_row("look at", Text("rollouts " + ", ".join(map(str, advisory.rollouts))))
