"""Two runs side by side, as tables for a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.record.first_difference import Compared, FirstDifference

MOST = 20
"""Settings that are listed."""


def told(compared: Compared, one: str, other: str) -> RenderableType:
    """What differs between two runs of these names: settings, then the first thing that happened otherwise."""
    parts: list[RenderableType] = []
    if compared.settings:
        table = Table(title="settings that differ", title_justify="left")
        for heading in ("key", one, other):
            table.add_column(heading, overflow="fold")
        for key, mine, theirs in compared.settings[:MOST]:
            table.add_row(Text(key), Text(str(mine)), Text(str(theirs)))
        parts.append(table)
        if len(compared.settings) > MOST:
            parts.append(Text(f"... and {len(compared.settings) - MOST} more"))
    before = f"{compared.steps} steps and {compared.rollouts} rollouts"
    if compared.first is None:
        parts.append(Text(f"the same in all that was recorded: {before}"))
    else:
        parts += [
            Text(f"first difference, after {before} that are the same:", "bold"),
            _one(compared.first, one, other),
        ]
    parts += [Text(remark, "yellow") for remark in compared.remarks]
    return Group(*parts)


def _one(first: FirstDifference, one: str, other: str) -> Table:
    table = Table(show_header=False)
    rows = [("what", first.what), ("where", first.where), (one, str(first.one)), (other, str(first.other))]
    if any(index is not None for index in first.indices):
        rows.append(("rollout", " and ".join("none" if at is None else str(at) for at in first.indices)))
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table
