"""Draws the vital signs of a run with rich."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.observe.analysis.text import around, event_text, figure, line, moment
from paceline.observe.analysis.vitals import MetricTrend, Vitals, vitals
from paceline.observe.monitor.plain import Sparkline
from paceline.observe.monitor.text import change, count, reasons, score, seconds
from paceline.observe.record import RunFolder
from paceline.observe.record.advice import Advisory, advice_window, advise

STYLES = {"running": "green", "starting": "cyan", "finished": "green", "interrupted": "yellow"}
UPDATE = {"grad norm": "grad_norm", "entropy": "entropy", "mismatch": "mismatch_kl", "clipped": "clip_fraction"}
WIDE = 120
"""Columns from which on there is room for two things beside one another."""
MOST_ENVS = MOST_LANES = 6
MOST_EVENTS = 8
_LABEL = 15

Pairs = Iterable[tuple[str, RenderableType]]


def draw(run: Vitals, advice: Sequence[Advisory], problems: Sequence[str], width: int) -> RenderableType:
    """The whole picture of a run."""
    head = [_title(run, width), _progress(run, width), *_trouble(run), Text()]
    learning, pace = [*_learning(run), *_update(run)], list(_pace(run))
    warnings, events = list(_warnings(run, advice, problems)), list(_events(run))
    if width < WIDE:
        return Group(*head, _grid([*learning, *pace, *warnings, *_lanes(run, 10, MOST_LANES), *events]))
    beside = Table.grid(padding=(0, 4), expand=True)
    beside.add_column(ratio=1)
    beside.add_column(ratio=1)
    beside.add_row(_grid(learning), _grid([*pace, *_lanes(run, 20, 2 * MOST_LANES)]))
    return Group(*head, beside, Text(), _grid([*warnings, *events]))


def bar(share: float, width: int) -> str:
    """A share as blocks; anything above nothing is seen."""
    full = min(width, max(round(share * width), int(share > 0)))
    return "█" * full + "░" * (width - full)


def _title(run: Vitals, width: int) -> Text:
    status = run.status
    facts = [*run.tags, status.device, f"{count(status.parameters)} parameters" if status.parameters else ""]
    title = Text.assemble(
        (line(run.name, 40), "bold"),
        "  ",
        (status.state, f"bold {STYLES.get(status.state, 'red')}"),
        (f"  {' · '.join(line(fact, 30) for fact in facts if fact)}", "dim"),
    )
    title.truncate(width, overflow="ellipsis")
    return title


def _progress(run: Vitals, width: int) -> Text:
    status, total = run.status, run.status.total_steps
    words = [f"step {status.step}" + (f" of {total}" if total else "")]
    if run.left is not None:
        words.append(f"about {around(run.left)} left")
    if run.pace is not None:
        words.append(f"{seconds(run.pace)} a step")
    if run.seen is not None:
        age = f"{around(run.now - run.seen)} ago"
        words.append(f"last news {age if status.alive else moment(run.seen)}")
    text = Text(" · ".join(words))
    if not total:
        return text
    room = max(6, min(60, width - len(text) - 2))
    return Text.assemble((bar(status.step / total, room), "cyan"), "  ", text)


def _trouble(run: Vitals) -> list[RenderableType]:
    if run.status.state in ("running", "finished"):
        return []
    what, command = run.onward
    onward = [Text(f"{what}: {line(command)}", "dim")] if command else []
    return [Text(f"{run.status.state}: {line(run.why)}", STYLES.get(run.status.state, "red")), *onward]


def _learning(run: Vitals) -> Pairs:
    if not run.rewards and not run.held_out:
        yield "reward", Text("no step is finished yet", "dim")
    for label, trends in (("reward", run.rewards), (f"held-out {run.kind}", run.held_out)):
        envs = [env for env in trends if env] if len(trends) > 2 else []
        if "" in trends:
            yield label, _trend(trends[""])
        for env in envs[:MOST_ENVS]:
            yield f" {line(env, _LABEL - 2)}", _trend(trends[env])
        if len(envs) > MOST_ENVS:
            yield "", Text(f"and {len(envs) - MOST_ENVS} more environments", "dim")


def _trend(trend: MetricTrend) -> RenderableType:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True, width=7, justify="right")
    row.add_column(ratio=1, no_wrap=True)
    row.add_column(no_wrap=True, justify="right")
    moved = change(trend.first, trend.last) if len(trend.curve) > 1 else ""
    style = {"+": "green", "-": "red"}.get(moved[:1], "dim")
    since = Text.assemble((f"from {score(trend.first)} " if moved else "first value", "dim"), (moved, style))
    row.add_row(Text(score(trend.last), "bold"), Sparkline(trend.values), since)
    return row


def _update(run: Vitals) -> Pairs:
    recent, losses = run.recent, run.losses
    if losses:
        whole = figure(losses.pop("loss", None))
        parts = [f"{line(name.removeprefix('loss/'), 20)} {figure(value)}" for name, value in losses.items()]
        yield "loss", Text(f"{whole}  =  {' + '.join(parts)}" if len(parts) > 1 else whole)
    figures = [f"{label} {figure(recent[name])}" for label, name in UPDATE.items() if name in recent]
    if figures:
        yield "update", Text("  ".join(figures))


def _pace(run: Vitals) -> Pairs:
    recent = run.recent
    if "staleness/mean" in recent:
        allowed = "" if run.allowed is None else f", {run.allowed} allowed"
        yield "staleness", Text(f"{recent['staleness/mean']:.1f} versions old{allowed}")
    speeds = (("tokens/s", "sampled"), ("train_tokens/s", "trained"))
    if known := [f"{count(recent[name])} {word}" for name, word in speeds if name in recent]:
        yield "tokens a second", Text(", ".join(known))
    if recent:
        yield "who waits", Text(run.waits)


def _lanes(run: Vitals, width: int, most: int) -> Pairs:
    for at, lane in enumerate(run.busy.lanes[:most]):
        since = Text(f"  busy, last {around(run.busy.seconds)}" if not at else "", "dim")
        name = line(lane.lane.replace("environment ", "env "), _LABEL)
        share = (f"{bar(lane.share, width)} {lane.share:4.0%}", "cyan")
        yield name, Text.assemble(share, (f"  {lane.detail}" if lane.detail else "", "dim"), since)
    if (more := len(run.busy.lanes) - most) > 0:
        yield "", Text(f"and {more} more lanes", "dim")


def _warnings(run: Vitals, advice: Sequence[Advisory], problems: Sequence[str]) -> Pairs:
    if run.dropped:
        yield "dropped", Text(line(reasons(run.dropped)))
    for advisory in advice:
        yield "advice", Text(line(f"{advisory.title}: {advisory.seen}"), "yellow")
    for problem in problems:
        yield "unreadable", Text(line(problem), "yellow")


def _events(run: Vitals) -> Pairs:
    for event in reversed(run.events[-MOST_EVENTS:]):
        style = "yellow" if event.get("event") == "note" else ""
        yield moment(event.get("time"))[-8:], Text(event_text(event), style)


def _grid(pairs: Pairs) -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="dim", no_wrap=True, width=_LABEL, overflow="ellipsis")
    grid.add_column(ratio=1)
    for label, value in pairs:
        grid.add_row(Text(label), value)
    return grid


RESCAN_SECONDS = 10.0
"""Seconds between two looks at all that was recorded."""
PLAIN_WIDTH = 100


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run's vital run, the advice on it, and what could not be read."""

    run: Vitals
    advice: list[Advisory] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def drawn(self, width: int) -> RenderableType:
        return draw(self.run, self.advice, self.problems, width)


class RunPoller:
    """Looks at one run again and again. Files are read on from where the last look ended."""

    def __init__(self, run: RunFolder, clock: Callable[[], float] = time.time) -> None:
        self._run, self._clock = run, clock
        self._whole: tuple[float, list[Advisory], list[str]] | None = None
        self._vitals: Vitals | None = None

    def look(self) -> RunSnapshot:
        now = self._clock()
        if self._whole is None or now - self._whole[0] >= RESCAN_SECONDS:
            self._whole = now, advise(advice_window(self._run)), self._run.problems()
        _, advice, problems = self._whole
        self._vitals = vitals(self._run, now, self._vitals)
        return RunSnapshot(self._vitals, advice, problems)


def snapshot(run: RunFolder, width: int = PLAIN_WIDTH) -> str:
    """The picture as plain text."""
    page = Console(file=StringIO(), width=width, color_system=None, highlight=False, emoji=False)
    page.print(RunPoller(run).look().drawn(width))
    assert isinstance(page.file, StringIO)
    return "\n".join(row.rstrip() for row in page.file.getvalue().splitlines()) + "\n"
