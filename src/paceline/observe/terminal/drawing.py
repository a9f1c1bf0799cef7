"""Draws the vital signs of a run with rich."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from paceline.observe.analysis.text import event_text, format_number, format_timestamp, format_whole_seconds, safe_line
from paceline.observe.analysis.vitals import MetricTrend, Vitals, vitals
from paceline.observe.monitor.plain import Sparkline
from paceline.observe.monitor.text import format_change, format_count, format_reasons, format_score, format_seconds
from paceline.observe.record import RunFolder
from paceline.observe.record.advice import Advisory, advice_window, advise

STYLES = {"running": "green", "starting": "cyan", "finished": "green", "interrupted": "yellow"}
UPDATE_METRICS = {"grad norm": "grad_norm", "entropy": "entropy", "mismatch": "mismatch_kl", "clipped": "clip_fraction"}
WIDE_COLUMNS = 120
"""Terminal width from which two columns fit."""
MOST_ENVS, MOST_LANES, MOST_EVENTS = 6, 6, 8
_LABEL_WIDTH = 15

Pairs = Iterable[tuple[str, RenderableType]]


def bar(share: float, width: int) -> str:
    """A share as blocks, at least one block for any share above 0."""
    full = min(width, max(round(share * width), int(share > 0)))
    return "█" * full + "░" * (width - full)


def _health_style(run: Vitals) -> str:
    return "red" if run.health.is_bad else "green" if run.health.verdict == "healthy" else "yellow"


def _state_style(run: Vitals) -> str:
    """Green is for a run that ended well, and not only ended."""
    if run.status.state == "finished" and run.health.is_bad:
        return "yellow"
    return STYLES.get(run.status.state, "red")


def _title(run: Vitals, width: int) -> Text:
    status = run.status
    title = Text.assemble(
        (safe_line(run.name, 40), "bold"),
        "  ",
        (status.state, f"bold {_state_style(run)}"),
        ("  ", ""),
        (run.health.verdict, f"bold {_health_style(run)}"),
        (f"  {' · '.join(safe_line(fact, 30) for fact in run.facts)}", "dim"),
    )
    title.truncate(width, overflow="ellipsis")
    return title


def _progress(run: Vitals, width: int) -> Text:
    status, total = run.status, run.status.total_steps
    words = [f"step {status.step}" + (f" of {total}" if total else "")]
    if run.seconds_left is not None:
        words.append(f"about {format_whole_seconds(run.seconds_left)} left")
    if run.pace is not None:
        words.append(f"{format_seconds(run.pace)} a step")
    if run.last_seen is not None:
        age = f"{format_whole_seconds(run.now - run.last_seen)} ago"
        words.append(f"last news {age if status.alive else format_timestamp(run.last_seen)}")
    text = Text(" · ".join(words))
    if not total:
        return text
    room = max(6, min(60, width - len(text) - 2))
    return Text.assemble((bar(status.step / total, room), "cyan"), "  ", text)


def _problem_lines(run: Vitals) -> list[RenderableType]:
    health: list[RenderableType] = [Text(f"{run.health.verdict}: {safe_line(run.health.reason)}", _health_style(run))]
    health = [] if run.health.verdict in ("healthy", "too early to say") else health
    if run.status.state in ("running", "finished"):
        return health
    what, command = run.next_action
    onward = [Text(f"{what}: {safe_line(command)}", "dim")] if command else []
    return [
        Text(f"{run.status.state}: {safe_line(run.state_reason)}", STYLES.get(run.status.state, "red")),
        *onward,
        *health,
    ]


def _learning(run: Vitals) -> Pairs:
    if not run.rewards and not run.held_out:
        yield "reward", Text("no step is finished yet", "dim")
    for label, trends in (("reward", run.rewards), (f"held-out {run.eval_kind}", run.held_out)):
        envs = [env for env in trends if env] if len(trends) > 2 else []
        window = ""
        for env in [env for env in ("", *envs[:MOST_ENVS]) if env in trends]:
            trend = trends[env]
            yield f" {safe_line(env, _LABEL_WIDTH - 2)}" if env else label, _trend(trend)
            if window != (window := _window(trend)):
                yield "", Text(window, "dim")
        if len(envs) > MOST_ENVS:
            yield "", Text(f"and {len(envs) - MOST_ENVS} more environments", "dim")


def _trend(trend: MetricTrend) -> RenderableType:
    columns = Column(no_wrap=True, width=7, justify="right"), Column(ratio=1, no_wrap=True)
    row = Table.grid(*columns, Column(no_wrap=True, justify="right"), padding=(0, 2), expand=True)
    moved = format_change(trend.first, trend.last) if trend.has_moved else ""
    style = {"+": "green", "-": "red"}.get(moved[:1], "dim")
    since = Text.assemble((f"from {format_score(trend.first)} " if moved else "", "dim"), (moved, style))
    row.add_row(Text(format_score(trend.last), "bold"), Sparkline(trend.values), since)
    return row


def _window(trend: MetricTrend) -> str:
    """The steps that the figures of a trend are of."""
    return f"{trend.last_steps}, from {trend.first_steps}" if trend.has_moved else trend.last_steps


def _update(run: Vitals) -> Pairs:
    recent, losses = run.recent_means, run.losses
    if losses:
        whole = format_number(losses.pop("loss", None))
        named = [(safe_line(name.removeprefix("loss/"), 20), value) for name, value in losses.items()]
        parts = [f"{name} {format_number(value)}" for name, value in named]
        yield "loss", Text(f"{whole}  =  {' + '.join(parts)}" if len(parts) > 1 else whole)
    figures = [f"{label} {format_number(recent[name])}" for label, name in UPDATE_METRICS.items() if name in recent]
    if figures:
        yield "update", Text("  ".join(figures))


def _pace(run: Vitals) -> Pairs:
    recent = run.recent_means
    if "staleness/mean" in recent:
        allowed = "" if run.max_staleness is None else f", {run.max_staleness} allowed"
        yield "staleness", Text(f"{recent['staleness/mean']:.1f} versions old{allowed}")
    speeds = (("tokens/s", "sampled"), ("train_tokens/s", "trained"))
    if known := [f"{format_count(recent[name])} {word}" for name, word in speeds if name in recent]:
        yield "tokens a second", Text(", ".join(known))
    if recent:
        yield "who waits", Text(run.waiting_side)


def _lanes(run: Vitals, width: int, most: int) -> Pairs:
    for at, lane in enumerate(run.load.lanes[:most]):
        since = Text(f"  busy, last {format_whole_seconds(run.load.seconds)}" if not at else "", "dim")
        name = safe_line(lane.lane.replace("environment ", "env "), _LABEL_WIDTH)
        share = (f"{bar(lane.share, width)} {lane.share:4.0%}", "cyan")
        yield name, Text.assemble(share, (f"  {lane.detail}" if lane.detail else "", "dim"), since)
    if (more := len(run.load.lanes) - most) > 0:
        yield "", Text(f"and {more} more lanes", "dim")


def _warnings(run: Vitals, advice: Sequence[Advisory], problems: Sequence[str]) -> Pairs:
    if run.dropped_counts:
        yield "dropped", Text(safe_line(format_reasons(run.dropped_counts)))
    for advisory in advice:
        yield (
            "advice",
            Text(
                safe_line(f"{advisory.title}{advisory.comparison and f' ({advisory.comparison})'}: {advisory.seen}"),
                "yellow",
            ),
        )
    for problem in problems:
        yield "unreadable", Text(safe_line(problem), "yellow")


def _events(run: Vitals) -> Pairs:
    for event in reversed(run.events[-MOST_EVENTS:]):
        style = "yellow" if event.get("event") == "note" else ""
        yield format_timestamp(event.get("time"))[-8:], Text(event_text(event), style)


def _grid(pairs: Pairs) -> Table:
    labels = Column(style="dim", no_wrap=True, width=_LABEL_WIDTH, overflow="ellipsis")
    grid = Table.grid(labels, Column(ratio=1), padding=(0, 1), expand=True)
    for label, value in pairs:
        grid.add_row(Text(label), value)
    return grid


CHARTED_METRICS = ("entropy", "grad_norm", "loss", "length", "tokens/s", "mismatch_kl")
"""Metrics with a chart after reward and held-out result, as far as there is room."""
LEAST_CHART_ROWS, CHART_COLUMNS = 6, 60
"""Lines of the lowest chart, its title among them, and columns of the narrowest."""
_BLOCKS = " ▁▂▃▄▅▆▇█"


def _chart(name: str, values: Sequence[float], width: int, height: int) -> RenderableType:
    """A curve as columns of blocks over its whole width, with its highest and lowest value beside it."""
    count, room = len(values), max(1, width - _LABEL_WIDTH)
    starts = [at * count // room for at in range(room + 1)]
    means = [statistics.fmean(values[a : max(b, a + 1)]) for a, b in itertools.pairwise(starts)]
    low, high = min(means), max(means)
    span = max(high - low, 0.05 * abs(high), 1e-12)  # a flat curve looks flat
    levels = [1 + round((mean - low) / span * (8 * (height - 1) - 1)) for mean in means]
    rows = ["".join(_BLOCKS[min(8, max(0, level - 8 * at))] for level in levels) for at in reversed(range(height - 1))]
    labels = [format_number(high), *[""] * (height - 3), format_number(low)]
    label = Column(style="dim", no_wrap=True, width=_LABEL_WIDTH - 2, justify="right")
    grid = Table.grid(label, Column(no_wrap=True), padding=(0, 1))
    grid.add_row("", Text.assemble((safe_line(name, 40), "bold"), f"  {format_number(values[-1])}"))
    for value, row in zip(labels, rows, strict=True):
        grid.add_row(value, Text(row, "cyan"))
    return grid


def _charts(run: Vitals, width: int, rows: int) -> list[RenderableType]:
    """As many charts as the rows hold, side by side where the terminal is wide."""
    trends = {"reward": run.rewards.get(""), f"held-out {run.eval_kind}": run.held_out.get("")}
    curves = {name: trend.values for name, trend in trends.items() if trend is not None}
    for name in CHARTED_METRICS:
        curves[name] = [value for value in run.columns.get(name, ()) if value is not None]
    shown = [(name, values) for name, values in curves.items() if len(values) > 1]
    beside = max(1, min(len(shown), width // CHART_COLUMNS))
    lines = min(-(-len(shown) // beside), rows // LEAST_CHART_ROWS)
    if lines < 1:
        return []
    grid = Table.grid(*(Column(ratio=1) for _ in range(beside)), expand=True)
    for at in range(0, min(len(shown), lines * beside), beside):
        grid.add_row(*(_chart(*curve, width // beside, rows // lines) for curve in shown[at : at + beside]))
    return [grid]


RESCAN_SECONDS = 10.0
"""Seconds between two full scans of the record."""
PLAIN_WIDTH = 100


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run's vitals, the advice on it, and its unreadable files."""

    run: Vitals
    advice: list[Advisory]
    problems: list[str]

    def render(self, width: int, height: int = 0) -> RenderableType:
        """The picture of a terminal; charts fill what is left of its height."""
        above, below = self._parts(width)
        console = Console(width=width, file=StringIO())
        used = len(console.render_lines(Group(*above, *below), pad=False))
        return Group(*above, *_charts(self.run, width, height - used), *below)

    def _parts(self, width: int) -> tuple[list[RenderableType], list[RenderableType]]:
        """What stands above the charts, and below them."""
        run = self.run
        head = [_title(run, width), _progress(run, width), *_problem_lines(run), Text()]
        learning, pace = [*_learning(run), *_update(run)], list(_pace(run))
        warnings, events = list(_warnings(run, self.advice, self.problems)), list(_events(run))
        if width < WIDE_COLUMNS:
            return [*head, _grid([*learning, *pace, *warnings, *_lanes(run, 10, MOST_LANES)])], [_grid(events)]
        beside = Table.grid(Column(ratio=1), Column(ratio=1), padding=(0, 4), expand=True)
        beside.add_row(_grid(learning), _grid([*pace, *_lanes(run, 20, 2 * MOST_LANES)]))
        return [*head, beside, Text()], [_grid([*warnings, *events])]


class RunPoller:
    """Polls one run; each poll reads only what was written since the last one."""

    def __init__(self, run: RunFolder, clock: Callable[[], float] = time.time) -> None:
        self._run, self._clock = run, clock
        self._last_scan: tuple[float, list[Advisory], list[str]] | None = None
        self._vitals: Vitals | None = None

    def poll(self) -> RunSnapshot:
        now = self._clock()
        if self._last_scan is None or now - self._last_scan[0] >= RESCAN_SECONDS:
            self._last_scan = now, advise(advice_window(self._run)), self._run.problems()
        _, advice, problems = self._last_scan
        self._vitals = vitals(self._run, now, self._vitals)
        return RunSnapshot(self._vitals, advice, problems)


def snapshot(run: RunFolder) -> str:
    page = Console(file=StringIO(), width=PLAIN_WIDTH, color_system=None, highlight=False, emoji=False)
    with page.capture() as printed:
        page.print(RunPoller(run).poll().render(PLAIN_WIDTH))
    text = printed.get()  # bounded: it is printed
    return "\n".join(row.rstrip() for row in text.splitlines()) + "\n"
