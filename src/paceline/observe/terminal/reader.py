"""The reader of rollouts in `paceline top`: one conversation at a time, the newest first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static
from textual.worker import Worker, WorkerState

from paceline.observe.analysis.text import escape_control_chars, format_number, format_value, safe_line
from paceline.observe.monitor.show_rollout import ROLES
from paceline.observe.monitor.text import format_amount, format_seconds
from paceline.observe.record import Query, RolloutNotFound, RunFolder, StoredRollout
from paceline.observe.web.messages import conversations

FILTERS = {
    "all": Query(),
    "trained": Query(state="trained"),
    "dropped": Query(state="dropped:"),
    "held-out": Query(domain="evaluation"),
    "failed": Query(error=True),
}
SORTS = {"newest first": "-step", "best first": "-reward", "worst first": "reward"}
MOST_TEXT = 20_000
"""Characters of one text; the page of the rollout has all of them."""


@dataclass(frozen=True, slots=True)
class ReaderPage:
    """One rollout of a list, and where it stands there."""

    place: int
    total: int
    rollout: StoredRollout

    def title(self) -> Text:
        row = self.rollout.row
        state = row.state.replace(":", ": ").replace("_", " ")
        where = (f"rollout {row.index:,}", f"step {row.step:,}", row.env, row.actor if row.actor != "policy" else "")
        title = Text(" · ".join(safe_line(part, 40) for part in where if part), "bold")
        title.append(f"  reward {format_number(row.reward)}", "bold green" if row.reward else "bold yellow")
        return title.append(f"  {safe_line(state, 60)}", "dim")

    def render(self, width: int) -> RenderableType:
        return Group(*_facts(self.rollout), *_talks(self.rollout, width))


def find_page(run: RunFolder, query: Query, index: int | None, by: int) -> ReaderPage | None:
    """The rollout `by` places after this one, or the first of the list where it is not in it; none of an empty list."""
    beside = None if index is None else run.rollouts.neighbours(index, query)
    found = run.rollouts.find(replace(query, limit=1, offset=0))
    if not found.total:
        return None
    place = 0 if beside is None else min(max(0, beside.place + by), beside.total - 1)
    (row,) = run.rollouts.find(replace(query, limit=1, offset=place)).rows or found.rows
    return ReaderPage(place, found.total, run.rollouts.get(row.index))


def _facts(rollout: StoredRollout) -> Iterator[Text]:
    row = rollout.row
    if rollout.target:
        yield Text.assemble(("expected  ", "dim"), (safe_line(rollout.target, 400), "bold"))
    metrics = [f"{safe_line(name, 40)} {format_value(value)}" for name, value in rollout.metrics.items()]
    if metrics:
        yield Text.assemble(("metrics   ", "dim"), "  ".join(metrics))
    for verdict in rollout.verdicts:
        name, weight, score = verdict.get("judge"), verdict.get("weight"), verdict.get("score")
        yield Text.assemble(
            ("judge     ", "dim"), f"{safe_line(name, 40)}: {format_value(weight)} × {format_value(score)}"
        )
    versions = f"{row.version_min}" if row.version_min == row.version_max else f"{row.version_min} to {row.version_max}"
    facts = [f"advantage {format_number(row.advantage)}", format_amount(row.tokens, "token"), f"version {versions}"]
    facts += [row.finish, format_seconds(rollout.seconds) if rollout.seconds else ""]
    yield Text(" · ".join(safe_line(fact) for fact in facts if fact), "dim")
    if rollout.error:
        yield Text(f"error     {_plain(rollout.error)}", "red")


def _talks(rollout: StoredRollout, width: int) -> Iterator[RenderableType]:
    talks = conversations(rollout)
    for number, talk in enumerate(talks["shown"], start=talks["total"] - len(talks["shown"]) + 1):
        if talks["total"] > 1:
            yield Text(f"conversation {number} of {talks['total']}", "bold")
        if "prompt_tokens" in talk:
            yield Text(f"its prompt was given as {format_amount(talk['prompt_tokens'], 'token')}", "dim")
        for message in talk["messages"]:
            yield _panel(message, width)
    if not talks["shown"]:
        yield Text("its conversation was not kept", "dim")


def _panel(message: dict[str, Any], width: int) -> Panel:
    role, turn = message["role"] or "no role", message.get("turn")
    colour = ROLES.get(role, "white")
    title = Text(safe_line(role, 40), f"bold {colour}")
    if turn:
        facts = [f"turn {turn['number']}", format_amount(turn["tokens"], "token"), turn["finish"]]
        title.append(f"  {' · '.join(safe_line(fact) for fact in facts if fact)}", "dim")
    style = colour if turn else f"dim {colour}"
    return Panel(Group(*_body(message)), title=title, title_align="left", border_style=style, width=width)


def _body(message: dict[str, Any]) -> Iterator[Text]:
    for part in message["parts"]:
        what = f"{part['what']}: " if part["kind"] == "other" else ""
        yield Text(f"{what}{_plain(part['text'])}", {"thought": "dim italic"}.get(part["kind"], ""))
    for call in message["calls"]:
        yield Text(_plain(f"→ {call['name']}({call['arguments']})"), "magenta")
    if not message["parts"] and not message["calls"]:
        yield Text("nothing", "dim italic")


def _plain(text: str) -> str:
    left = len(text) - MOST_TEXT
    shown = escape_control_chars(text[:MOST_TEXT], keep="\n\t")
    return shown if left <= 0 else f"{shown}… (and {left:,} more characters)"


class ReaderScreen(Screen[None]):
    """The rollouts of one run. They are read in a thread, so that a slow disk blocks no key."""

    CSS = "VerticalScroll { padding: 0 1; } #at { padding: 0 1; color: $text-muted; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,r,q", "leave", "back"),
        Binding("j,right", "go(1)", "next"),
        Binding("k,left", "go(-1)", "previous"),
        Binding("f", "filter", "filter"),
        Binding("s", "sort", "sort"),
        Binding("down", "scroll(1)", show=False),
        Binding("up", "scroll(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
    ]

    def __init__(self, run: RunFolder) -> None:
        super().__init__()
        self._run = run
        self._filter, self._sort = next(iter(FILTERS)), next(iter(SORTS))
        self._page: ReaderPage | str | None = "reading"
        self._worker: Worker[ReaderPage | str | None] | None = None
        self._at, self._picture = Static(id="at", markup=False), Static(markup=False)
        self._scroll = VerticalScroll(can_focus=False)

    def compose(self) -> ComposeResult:
        yield self._at
        with self._scroll:
            yield self._picture
        yield Footer()

    def on_mount(self) -> None:
        self._show(0)

    def on_resize(self) -> None:
        self._draw()

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        if event.state is WorkerState.SUCCESS and event.worker is self._worker:
            self._page = event.worker.result
            self._scroll.scroll_home(animate=False)
            self._draw()

    def action_leave(self) -> None:
        self.dismiss()

    def action_go(self, by: int) -> None:
        self._show(by)

    def action_filter(self) -> None:
        self._filter = _next(list(FILTERS), self._filter)
        self._show(0)

    def action_sort(self) -> None:
        self._sort = _next(list(SORTS), self._sort)
        self._show(None)

    def action_scroll(self, by: int) -> None:
        self._scroll.scroll_relative(y=by, animate=False)

    def action_page(self, by: int) -> None:
        self._scroll.scroll_relative(y=by * self._scroll.size.height, animate=False)

    def _show(self, by: int | None) -> None:
        """The rollout so many places further on in the list, or the first of it."""
        index = self._page.rollout.row.index if by is not None and isinstance(self._page, ReaderPage) else None
        query = replace(FILTERS[self._filter], sort=SORTS[self._sort])
        self._worker = self.run_worker(lambda: self._read(query, index, by or 0), thread=True, exclusive=True)

    def _read(self, query: Query, index: int | None, by: int) -> ReaderPage | str | None:
        try:
            return find_page(self._run, query, index, by)
        except (OSError, RolloutNotFound) as error:
            return f"it cannot be read now: {safe_line(error)}"

    def _draw(self) -> None:
        page, which = self._page, f"{self._filter}, {self._sort}"
        if isinstance(page, ReaderPage):
            self._at.update(Text.assemble(page.title(), (f"   {page.place + 1:,} of {page.total:,}: {which}", "dim")))
            self._picture.update(page.render(max(20, self.size.width - 4)))
        else:
            self._at.update(Text(which))
            self._picture.update(Text(page or "no rollout"))


def _next(names: list[str], name: str) -> str:
    return names[(names.index(name) + 1) % len(names)]
