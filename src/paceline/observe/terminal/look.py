"""Reads a run's vital signs now and then, and draws them.

Makes text of models and files safe to print: it moves no cursor and reorders no line.
"""

import math
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.observe.monitor.plain import Sparkline
from paceline.observe.monitor.text import change, count, one_line, reasons, score, seconds
from paceline.observe.record import RunFolder
from paceline.observe.record.advice import Advisory, advise, sight_of
from paceline.observe.terminal.signs import MetricTrend, Signs, signs

TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029")
"""Characters that reverse what stands behind them, or break a line invisibly."""


def harmless(text: str, keep: str = "") -> str:
    """The text with control characters spelled out, as in `\\x1b[31m`; those in `keep` stay."""
    if text.isprintable():
        return text
    return "".join(char if char in keep or not _acts(char) else _spelled(char) for char in text)


def line(value: Any, most: int = 400) -> str:
    """Anything as one harmless line."""
    text = harmless(one_line(str(value)))
    return text if len(text) <= most else text[: most - 1] + "…"


def figure(value: float | None) -> str:
    """0.612, 0.0004, 12,300: as many digits as a reader can use."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.1f}"
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.2g}"


def around(value: float) -> str:
    """4 s, 3 min 05 s: a time in whole seconds."""
    if not math.isfinite(value):
        return "an unknown time"
    return seconds(value) if value >= 9.5 else f"{max(0, round(value))} s"


def moment(stamp: float) -> str:
    """2026-11-16 08:46:25, where this machine is; as it is written down where that is no time at all."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))
    except (OverflowError, ValueError, OSError):
        return str(stamp)


def happened(event: Mapping[str, Any]) -> str:
    """An event of `events.jsonl` in words."""
    match event.get("event"):
        case "begin":
            start = event.get("start_step")
            where = f"goes on from step {start}" if start else "starts"
            return line(f"{where}, {event.get('total_steps', '?')} steps on {event.get('device', '?')}")
        case "end":
            message = event.get("message")
            return line(f"{event.get('status')} at step {event.get('step')}" + (f": {message}" if message else ""))
        case "roll_back":
            return line(f"back to step {event.get('step')}")
    rest = {key: value for key, value in event.items() if key not in ("time", "event")}
    return line(event.get("text", rest))


def _acts(char: str) -> bool:
    return char in TURNING or unicodedata.category(char) in ("Cc", "Cs")


def _spelled(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


STYLES = {"running": "green", "starting": "cyan", "finished": "green", "interrupted": "yellow"}
UPDATE = {"grad norm": "grad_norm", "entropy": "entropy", "mismatch": "mismatch_kl", "clipped": "clip_fraction"}
WIDE = 120
"""Columns from which on there is room for two things beside one another."""
MOST_ENVS = MOST_LANES = 6
MOST_EVENTS = 8
_LABEL = 15

Pairs = Iterable[tuple[str, RenderableType]]


def drawn(signs: Signs, advice: Sequence[Advisory], problems: Sequence[str], width: int) -> RenderableType:
    """The whole picture of a run."""
    head = [_title(signs, width), _progress(signs, width), *_trouble(signs), Text()]
    learning, pace = [*_learning(signs), *_update(signs)], list(_pace(signs))
    said, events = list(_said(signs, advice, problems)), list(_events(signs))
    if width < WIDE:
        return Group(*head, _grid([*learning, *pace, *said, *_lanes(signs, 10, MOST_LANES), *events]))
    beside = Table.grid(padding=(0, 4), expand=True)
    beside.add_column(ratio=1)
    beside.add_column(ratio=1)
    beside.add_row(_grid(learning), _grid([*pace, *_lanes(signs, 20, 2 * MOST_LANES)]))
    return Group(*head, beside, Text(), _grid([*said, *events]))


def bar(share: float, width: int) -> str:
    """A share as blocks; anything above nothing is seen."""
    full = min(width, max(round(share * width), int(share > 0)))
    return "█" * full + "░" * (width - full)


def _title(signs: Signs, width: int) -> Text:
    status = signs.status
    facts = [*signs.tags, status.device, f"{count(status.parameters)} parameters" if status.parameters else ""]
    title = Text.assemble(
        (line(signs.name, 40), "bold"),
        "  ",
        (status.state, f"bold {STYLES.get(status.state, 'red')}"),
        (f"  {' · '.join(line(fact, 30) for fact in facts if fact)}", "dim"),
    )
    title.truncate(width, overflow="ellipsis")
    return title


def _progress(signs: Signs, width: int) -> Text:
    status, total = signs.status, signs.status.total_steps
    words = [f"step {status.step}" + (f" of {total}" if total else "")]
    if signs.left is not None:
        words.append(f"about {around(signs.left)} left")
    if signs.pace is not None:
        words.append(f"{seconds(signs.pace)} a step")
    if signs.seen is not None:
        age = f"{around(signs.now - signs.seen)} ago"
        words.append(f"last news {age if status.alive else moment(signs.seen)}")
    text = Text(" · ".join(words))
    if not total:
        return text
    room = max(6, min(60, width - len(text) - 2))
    return Text.assemble((bar(status.step / total, room), "cyan"), "  ", text)


def _trouble(signs: Signs) -> list[RenderableType]:
    if signs.status.state in ("running", "finished"):
        return []
    told = [Text(f"{signs.status.state}: {line(signs.why)}", STYLES.get(signs.status.state, "red"))]
    what, command = signs.onward
    if command:
        told.append(Text(f"{what}: {line(command)}", "dim"))
    return [*told]


def _learning(signs: Signs) -> Pairs:
    if not signs.rewards and not signs.held_out:
        yield "reward", Text("no step is finished yet", "dim")
    for label, courses in (("reward", signs.rewards), (f"held-out {signs.kind}", signs.held_out)):
        envs = [env for env in courses if env] if len(courses) > 2 else []
        if "" in courses:
            yield label, _course(courses[""])
        for env in envs[:MOST_ENVS]:
            yield f" {line(env, _LABEL - 2)}", _course(courses[env])
        if len(envs) > MOST_ENVS:
            yield "", Text(f"and {len(envs) - MOST_ENVS} more environments", "dim")


def _course(course: MetricTrend) -> RenderableType:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True, width=7, justify="right")
    row.add_column(ratio=1, no_wrap=True)
    row.add_column(no_wrap=True, justify="right")
    moved = change(course.first, course.last) if len(course.curve) > 1 else ""
    style = {"+": "green", "-": "red"}.get(moved[:1], "dim")
    since = Text.assemble((f"from {score(course.first)} " if moved else "first value", "dim"), (moved, style))
    row.add_row(Text(score(course.last), "bold"), Sparkline(course.values), since)
    return row


def _update(signs: Signs) -> Pairs:
    recent, losses = signs.recent, signs.losses
    if losses:
        whole = figure(losses.pop("loss", None))
        parts = [f"{line(name.removeprefix('loss/'), 20)} {figure(value)}" for name, value in losses.items()]
        yield "loss", Text(f"{whole}  =  {' + '.join(parts)}" if len(parts) > 1 else whole)
    figures = [f"{label} {figure(recent[name])}" for label, name in UPDATE.items() if name in recent]
    if figures:
        yield "update", Text("  ".join(figures))


def _pace(signs: Signs) -> Pairs:
    recent = signs.recent
    if "staleness/mean" in recent:
        allowed = "" if signs.allowed is None else f", {signs.allowed} allowed"
        yield "staleness", Text(f"{recent['staleness/mean']:.1f} versions old{allowed}")
    speeds = (("tokens/s", "sampled"), ("train_tokens/s", "trained"))
    told = [f"{count(recent[name])} {word}" for name, word in speeds if name in recent]
    if told:
        yield "tokens a second", Text(", ".join(told))
    if recent:
        yield "who waits", Text(signs.waits)


def _lanes(signs: Signs, width: int, most: int) -> Pairs:
    for at, lane in enumerate(signs.busy.lanes[:most]):
        since = Text(f"  busy, last {around(signs.busy.seconds)}" if not at else "", "dim")
        name = line(lane.lane.replace("environment ", "env "), _LABEL)
        share = (f"{bar(lane.share, width)} {lane.share:4.0%}", "cyan")
        yield name, Text.assemble(share, (f"  {lane.detail}" if lane.detail else "", "dim"), since)
    if (more := len(signs.busy.lanes) - most) > 0:
        yield "", Text(f"and {more} more lanes", "dim")


def _said(signs: Signs, advice: Sequence[Advisory], problems: Sequence[str]) -> Pairs:
    if signs.dropped:
        yield "dropped", Text(line(reasons(signs.dropped)))
    for advisory in advice:
        yield "advice", Text(line(f"{advisory.title}: {advisory.seen}"), "yellow")
    for problem in problems:
        yield "unreadable", Text(line(problem), "yellow")


def _events(signs: Signs) -> Pairs:
    for event in reversed(signs.events[-MOST_EVENTS:]):
        stamp = event.get("time")
        when = moment(stamp)[-8:] if isinstance(stamp, int | float) else ""
        style = "yellow" if event.get("event") == "note" else ""
        yield when, Text(happened(event), style)


def _grid(pairs: Pairs) -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="dim", no_wrap=True, width=_LABEL, overflow="ellipsis")
    grid.add_column(ratio=1)
    for label, value in pairs:
        grid.add_row(Text(label), value)
    return grid


SELDOM = 10.0
"""Seconds between two looks at all that was recorded."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one look has seen."""

    signs: Signs
    advice: list[Advisory] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def drawn(self, width: int) -> RenderableType:
        return drawn(self.signs, self.advice, self.problems, width)


class Looker:
    """Looks at one run again and again. Files are read on from where the last look ended."""

    def __init__(self, run: RunFolder, clock: Callable[[], float] = time.time) -> None:
        self._run, self._clock = run, clock
        self._whole: tuple[float, list[Advisory], list[str]] | None = None
        self._signs: Signs | None = None

    def look(self) -> Look:
        now = self._clock()
        if self._whole is None or now - self._whole[0] >= SELDOM:
            self._whole = now, advise(sight_of(self._run)), self._run.problems()
        _, advice, problems = self._whole
        self._signs = signs(self._run, now, self._signs)
        return Look(self._signs, advice, problems)
