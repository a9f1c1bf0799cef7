"""The live view of `paceline top`: polls the run in a thread, so that a slow disk blocks no key."""

from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static
from textual.worker import Worker, WorkerState

from paceline.errors import PacelineError
from paceline.observe.analysis.text import safe_line
from paceline.observe.terminal.drawing import RunPoller, RunSnapshot
from paceline.observe.terminal.reader import ReaderScreen
from paceline.observe.web.runs import Runs

POLL_SECONDS = 1.0
"""Seconds between two polls."""
HELP = """\
q          leave; the run goes on
j k ↓ ↑    the next or previous run of a folder; scrolls a single one
PgUp PgDn  scroll
r          reads rollouts: j k from one to the next, f filters by what
           became of them, s sorts, Esc comes back
t          light or dark
?          this help; any key closes it

Figures are means over the last 10 steps. Reward and held-out name their
steps; `from` is the start of the run.

held-out   what the policy does on rows that never train
mismatch   how far trainer and sampler are apart; should stay near 0
staleness  how many updates old the weights were that sampled
busy       share of the last minute before a step ended
health     after the state: whether the run learns, by its own metrics
advice     what the run's figures say against it; `paceline doctor RUN`
           has the evidence and the setting to change
"""


class HelpScreen(ModalScreen[None]):
    CSS = """
    HelpScreen { align: center middle; }
    HelpScreen Static { width: auto; max-width: 100%; padding: 0 2; border: round $accent; background: $surface; }
    """

    def compose(self) -> ComposeResult:
        yield Static(HELP, markup=False)

    def on_key(self) -> None:
        self.dismiss()


class TopApp(App[None]):
    """The runs of a folder, one at a time."""

    ENABLE_COMMAND_PALETTE = False
    CSS = "VerticalScroll { padding: 0 1; } #place { padding: 0 1; color: $text-muted; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("j,down", "go(1)", "next"),
        Binding("k,up", "go(-1)", "previous"),
        Binding("pagedown", "page(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("r", "read", "rollouts"),
        Binding("t", "theme", "theme"),
        Binding("question_mark", "help", "help"),
    ]

    def __init__(self, runs: Runs) -> None:
        super().__init__()
        self._runs = runs
        self._paths = runs.paths()
        self.run_name = next(iter(self._paths))
        """The name of the run on screen."""
        self._pollers: dict[str, RunPoller] = {}
        self._snapshot: RunSnapshot | str = ""
        self._worker: Worker[RunSnapshot | str] | None = None
        self._position, self._picture = Static(id="place", markup=False), Static(markup=False)
        self._scroll = VerticalScroll(can_focus=False)

    def compose(self) -> ComposeResult:
        yield self._position
        with self._scroll:
            yield self._picture
        yield Footer()

    def on_mount(self) -> None:
        self.set_interval(POLL_SECONDS, self.poll)
        self._show_run(self.run_name)

    def on_resize(self) -> None:
        self._draw()

    def poll(self) -> None:
        """Poll the run in a worker, unless the last poll still runs."""
        if self._worker is None or self._worker.is_finished:
            name = self.run_name
            self._worker = self.run_worker(lambda: self._read(name), thread=True, name=name)

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        if event.state is not WorkerState.SUCCESS:
            return
        if event.worker.name != self.run_name:  # the user went on to another run meanwhile
            self.poll()
        elif (snapshot := event.worker.result) is not None:
            self._snapshot = snapshot
            self._draw()

    def action_go(self, by: int) -> None:
        # Those that are known keep their places, whichever of them wrote last.
        self._paths |= self._runs.paths()
        order = list(self._paths)
        if len(order) > 1:
            self._show_run(order[(order.index(self.run_name) + by) % len(order)])
        else:
            self._scroll.scroll_relative(y=by, animate=False)

    def action_page(self, by: int) -> None:
        self._scroll.scroll_relative(y=by * self._scroll.size.height, animate=False)

    def action_theme(self) -> None:
        self.theme = "textual-light" if self.theme == "textual-dark" else "textual-dark"

    def action_read(self) -> None:
        if (path := self._paths[self.run_name]).is_dir():
            self.push_screen(ReaderScreen(self._runs.open_path(path)))

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    def _show_run(self, name: str) -> None:
        self.run_name, self._snapshot = name, f"reading {safe_line(name)}"
        order = list(self._paths)
        self._position.display = len(order) > 1
        self._position.update(Text(f"run {order.index(name) + 1} of {len(order)}"))
        self._draw()
        self.poll()

    def _read(self, name: str) -> RunSnapshot | str:
        """Runs in a thread. Returns a sentence where the run cannot be read; the next poll tries again."""
        path = self._paths[name]
        if not path.is_dir():
            return f"{safe_line(path)} is gone"
        try:
            if name not in self._pollers:
                self._pollers[name] = RunPoller(self._runs.open_path(path))
            return self._pollers[name].poll()
        except (OSError, PacelineError) as error:
            return f"{safe_line(path)} cannot be read now: {safe_line(error)}"

    def _draw(self) -> None:
        snapshot = self._snapshot
        width = max(20, self.size.width - 4)  # the padding, and a bar to scroll by
        height = self.size.height - 1 - int(self._position.display)  # the keys below, and the place among the runs
        self._picture.update(Text(snapshot) if isinstance(snapshot, str) else snapshot.render(width, height))
