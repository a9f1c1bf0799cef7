"""The dashboard over a run of a million rollouts, in a real browser.

    python benchmarks/dashboard.py --folder runs/dashboard --json benchmarks/results/dashboard.json

`scripts/make_big_run.py` makes the run through the writer that real runs use (minutes; a folder that has it already is
taken as it is). `paceline ui` serves it, and Chromium looks at it. Times are the browser's own, on the wall:

  page, first     from the click to the frame that shows what the page is for; a server that was just started, a browser
                  that has seen nothing, no index of tickets beside the run; what the server reads ahead as it
                  starts, it reads while the browser starts. Files may be in the machine's memory
  page, again     the same, by a server and a browser that know the page: the best of some reloads, and their median
  filter          from the choice, or the last key, to the frame that shows what was found; the 0.3 s are among it which
                  the page waits for another key. The best of some, as the first one stands beside it

  first chart     from the navigation to the first drawn curve of a run of 10,000 steps, by a server that knows it

Bars: 1 s for the first chart, 1.5 s a page, 2 s a filter, 1 GB of memory, the most the server ever held. A busy
machine makes all of them worse: measure on a quiet one, or with `chrt -r 1` before the command.

Needs Chromium (`apt install chromium`, or its path in PACELINE_CHROMIUM) and the `dev` extra.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import BrowserContext, Page, Playwright, sync_playwright
from rich.progress import Progress

from bars import Row, arguments, finish

CHART_SECONDS, PAGE_SECONDS, FILTER_SECONDS, MOST_MEGABYTES = 1.0, 1.5, 2.0, 1000.0
LONG, LONG_STEPS = "long", 10_000
DRAWN = """() => {
  const canvas = document.querySelector(".chart.lead canvas");
  if (!canvas?.width) return 0;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.some((value) => value) ? performance.now() : 0;
}"""
"""Asked at each frame: when the first chart has anything on it."""
NAME = "big"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
PATIENCE = 60_000
"""Milliseconds after which a page counts as never shown."""
PAGES = {
    "runs": ("#/", "table.runs tbody tr"),
    "overview": (f"#/run/{NAME}/overview", "main:has(.vitals) .chart canvas"),
    "advice": (f"#/run/{NAME}/advice", ".advice table.list tbody tr"),
    "rollouts": (f"#/run/{NAME}/rollouts", "table.rollouts tbody tr"),
    "one rollout": (f"#/run/{NAME}/rollouts?id=500000", ".message"),
    "tokens": (f"#/run/{NAME}/tokens", ".token-chip"),
    "tickets": (f"#/run/{NAME}/tickets", ".tickets tbody tr"),
    "one ticket": (f"#/run/{NAME}/tickets?ticket=50000", ".ticket-life"),
    "replay": (f"#/run/{NAME}/replay", "main form, main .empty"),
    "config": (f"#/run/{NAME}/config", "table.config"),
}
SHOWN = """([wanted, before]) => {
  const said = document.querySelector("main [role=status]")?.textContent ?? "";
  const busy = document.querySelector("main [aria-busy=true], main .reading");
  return document.querySelector(wanted) && !busy && (before === null || said !== before) ? performance.now() : 0;
}"""
"""Asked at each frame: when what is wanted stands there, and what the page says of its count is no longer as before."""


class Filter:
    """One thing a reader does to a list."""

    def __init__(self, name: str, page: str, act: Callable[[Page], object]) -> None:
        self.name, self.page, self.act = name, page, act


FILTERS = [
    Filter("rollouts by environment", "rollouts", lambda page: page.get_by_label("Environment").select_option("code")),
    Filter("rollouts by reward", "rollouts", lambda page: page.get_by_label("Reward from").fill("0.8")),
    Filter("rollouts by a common text", "rollouts", lambda page: _search(page).fill("planet")),
    Filter("rollouts by a rare text", "rollouts", lambda page: _search(page).fill("castle forest needle bridge")),
    Filter("tickets by state", "tickets", lambda page: page.get_by_label("State").select_option("dropped")),
    Filter("tickets by reason", "tickets", lambda page: page.get_by_label("Dropped because").select_option("stale")),
]


def _search(page: Page):
    return page.locator("[data-field=text]")


def made(folder: Path, rollouts: int) -> Path:
    """The run of so many rollouts in this folder, unless it is there."""
    run, mark = folder / NAME, folder / f"{NAME}-{rollouts}.made"
    if not mark.exists():
        sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
        from make_big_run import make

        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{NAME}-*.made"):
            old.unlink()
        with Progress() as progress:
            task = progress.add_task("rollouts", total=rollouts)
            make(run, rollouts, made=lambda count: progress.update(task, completed=count))
        mark.touch()
    return run


@contextmanager
def dashboard(folder: Path, peaks: list[float]) -> Iterator[str]:
    """The real command over the folder; the most memory it held is added to the peaks when it ends."""
    command = [sys.executable, "-m", "paceline", "ui", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            found = re.search(r"http://\S+?(?=/\s)", said)
            if found is None:
                raise SystemExit(f"paceline ui did not say where it is: {said!r}")
            yield found.group()
            peaks.append(held(server.pid))
        finally:
            server.terminate()
            server.wait(30)


def held(pid: int) -> float:
    """The most megabytes that a process ever had in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:"))


@contextmanager
def chromium(driver: Playwright) -> Iterator[BrowserContext]:
    """A browser that has seen nothing."""
    path = os.environ.get("PACELINE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        raise SystemExit("there is no Chromium: apt install chromium, or name it in PACELINE_CHROMIUM")
    with tempfile.TemporaryDirectory() as profile:
        size = {"width": 1440, "height": 900}
        context = driver.chromium.launch_persistent_context(profile, executable_path=path, args=FLAGS, viewport=size)
        context.set_default_timeout(PATIENCE)
        yield context
        context.close()


def opened(context: BrowserContext, address: str, name: str) -> float:
    """Seconds from the start of the navigation until a page shows what it is for."""
    place, wanted = PAGES[name]
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda told: wrong.append(told.text) if told.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{address}/{place}", wait_until="commit")
    seconds = page.wait_for_function(SHOWN, arg=[wanted, None]).json_value() / 1000
    page.close()
    if wrong:
        raise SystemExit(f"the page {name} complained: {wrong[0]}")
    return seconds


def filtered(context: BrowserContext, address: str, one: Filter) -> tuple[float, str]:
    """Seconds until a list shows what a filter found, and what it says it found."""
    place, wanted = PAGES[one.page]
    page = context.new_page()
    page.goto(f"{address}/{place}")
    page.wait_for_function(SHOWN, arg=[wanted, None])
    before, begun = page.evaluate("[document.querySelector('main [role=status]').textContent, performance.now()]")
    one.act(page)
    ended = page.wait_for_function(SHOWN, arg=[f"{wanted}, main .empty", before]).json_value()
    said = page.locator("main [role=status]").first.inner_text()
    page.close()
    return (ended - begun) / 1000, said


def cold(driver: Playwright, run: Path, peaks: list[float]) -> dict[str, float]:
    """Each page by a server and a browser of its own."""
    found = {}
    for name in PAGES:
        (run / ".tickets.index").unlink(missing_ok=True)
        with dashboard(run.parent, peaks) as address, chromium(driver) as context:
            found[name] = opened(context, address, name)
    return found


def warm(
    driver: Playwright, run: Path, peaks: list[float], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, str]]:
    """All pages and filters, again and again, by one server and one browser."""
    pages: dict[str, list[float]] = {name: [] for name in PAGES}
    filters: dict[str, list[float]] = {one.name: [] for one in FILTERS}
    said: dict[str, str] = {}
    with dashboard(run.parent, peaks) as address, chromium(driver) as context, Progress() as progress:
        task = progress.add_task("reloads", total=rounds)
        for _ in range(rounds):
            for name in PAGES:
                pages[name].append(opened(context, address, name))
            for one in FILTERS:
                seconds, said[one.name] = filtered(context, address, one)
                filters[one.name].append(seconds)
            progress.advance(task)
    return pages, filters, said


def first_chart(driver: Playwright, folder: Path, rounds: int) -> list[float]:
    """Seconds until the first curve of a long run is drawn, for each of some new tabs after a first one."""
    if not (folder / LONG).exists():
        sys.path.append(str(Path(__file__).parents[1] / "tests"))
        from recorded_runs import Told

        Told(folder, LONG, steps=LONG_STEPS).step(LONG_STEPS).end()
    seconds = []
    with dashboard(folder, []) as address, chromium(driver) as context:
        for _ in range(rounds + 1):
            page = context.new_page()
            page.goto(f"{address}/#/run/{LONG}/overview", wait_until="commit")
            seconds.append(page.wait_for_function(DRAWN).json_value() / 1000)
            page.close()
    return seconds[1:]


def against(what: str, seconds: float, bar: float, unit: str = "s") -> Row:
    return Row(what, unit, seconds, bar, "bar", bar / seconds, 1.0)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--folder", type=Path, help="where the run is, or is to be made (a temporary one)")
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5, help="reloads of each page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as spare, sync_playwright() as driver:
        run = made(options.folder or Path(spare), options.rollouts)
        peaks: list[float] = []
        first = cold(driver, run, peaks)
        pages, filters, said = warm(driver, run, peaks, options.rounds)
        charts = first_chart(driver, run.parent / "steps", options.rounds)
    rows = [against(f"{name}, first", seconds, PAGE_SECONDS) for name, seconds in first.items()]
    rows.append(against(f"first chart of {LONG_STEPS:,} steps", min(charts), CHART_SECONDS))
    rows += [against(f"{name}, again", min(seconds), PAGE_SECONDS) for name, seconds in pages.items()]
    for name, seconds in filters.items():
        rows.append(against(f"{name}, first: {said[name]}", seconds[0], FILTER_SECONDS))
        rows.append(against(f"{name}, again", min(seconds), FILTER_SECONDS))
    rows.append(against("peak memory of the server", max(peaks), MOST_MEGABYTES, "MB"))
    medians = {
        name: statistics.median(seconds) for name, seconds in {**pages, **filters, "first chart": charts}.items()
    }
    return finish(f"dashboard, {options.rollouts:,} rollouts", rows, options.json, medians=medians)


if __name__ == "__main__":
    sys.exit(main())
