"""Small rich renderables, such as sparklines, that the live view is built from."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.monitor.history import Curve
from paceline.monitor.text import change, score

_LEVELS: Final = "▁▂▃▄▅▆▇█"


class Sparkline:
    """A curve in one line of blocks. One too long for its room is averaged, a short one is not stretched."""

    def __init__(self, values: Sequence[float], style: str = "cyan") -> None:
        self.values = values
        self.style = style

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(8, options.max_width), options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(blocks(self.values, options.max_width), style=self.style, no_wrap=True, overflow="crop")


def blocks(values: Sequence[float], width: int) -> str:
    """The values as at most `width` block characters, from the lowest of them to the highest."""
    if not values or width < 1:
        return ""
    points = min(len(values), width)
    edges = [index * len(values) // points for index in range(points + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    # A flat curve should look flat, and not like noise blown up to full height.
    span = max(high - low, 0.05 * max(1.0, abs(high)))
    return "".join(_LEVELS[min(7, int((mean - low) / span * 8))] for mean in means)


def standing(curve: Curve) -> tuple[RenderableType, RenderableType]:
    """The last value, and how far it is from the first."""
    if not curve:
        return Text("-", "dim"), ""
    first, last = curve[0][1], curve[-1][1]
    if len(curve) == 1:
        return Text(score(last), "bold"), ""
    moved = change(first, last)
    return Text(score(last), "bold"), Text(moved, {"+": "green", "-": "red"}.get(moved[0], "dim"))


def block(pairs: Sequence[tuple[str, RenderableType]]) -> RenderableType:
    block = Table.grid(padding=(0, 1))
    block.add_column(style="dim", no_wrap=True)
    block.add_column(no_wrap=True)
    for label, value in pairs:
        block.add_row(label, value)
    return block


def share(value: float | None) -> RenderableType:
    if value is None:
        return Text("-", "dim")
    cell = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=1.0, completed=min(1.0, value), width=10, complete_style="cyan", finished_style="cyan")
    cell.add_row(bar, f"{value:4.0%}")
    return cell


def known(metrics: Mapping[str, float], key: str, form: Callable[[float], str]) -> Text:
    return Text(form(metrics[key])) if key in metrics else Text("-", "dim")
