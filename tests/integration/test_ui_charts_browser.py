"""Figures and charts of the web app in a real browser, compared with the record. Needs Chromium; else skipped."""

import re

import pytest
from test_ui_browser import _expect, _open, browser, page, pytestmark, tab  # noqa: F401

from headline_run import falling_lines, is_exact, is_reward, recorded_means, written_run
from paceline.observe.record import open_run
from paceline.observe.report.page import render_report
from paceline.observe.terminal import snapshot
from recorded_runs import Told, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    runs = tmp_path_factory.mktemp("runs")
    written_run(runs, "falling", falling_lines())
    written_run(runs, "short", falling_lines(3))
    return runs


@pytest.fixture(scope="module")
def address(folder):
    with served(folder) as here:
        yield here


def _numbers(text: str) -> list[float]:
    """The decimal numbers of a text, with a real minus or a hyphen."""
    return [float(number) for number in re.findall(r"[+-]?\d+\.\d+", text.replace("−", "-"))]


def test_every_page_shows_the_headline_figures_that_the_record_gives(page, folder, address):  # noqa: F811
    """Overview, table of runs, terminal and report, read as text, against sums over the lines of `metrics.jsonl`."""
    path = folder / "falling"
    rewards, held_out = recorded_means(path, is_reward), recorded_means(path, is_exact)
    assert [step for step, _ in held_out] == [0, 10, 20, 30]
    reward = [sum(value for _, value in part) / 5 for part in (rewards[-5:], rewards[:5])]
    exact = [held_out[-1][1], held_out[0][1]]
    run = open_run(path)
    report, terminal = re.sub(r"<[^>]+>", " ", render_report(run, 0)), snapshot(run)
    _open(page, address, "#/", "table.runs tbody tr")
    row = page.locator("tr[data-key=falling] td")
    cells = {"Reward": row.nth(4), "Held-out exact": row.nth(6)}
    table = {name: (cell.inner_text(), cell.locator("[title]").get_attribute("title")) for name, cell in cells.items()}
    _open(page, address, "#/run/falling/overview", ".vitals")
    for name, (now, start), (of_now, of_start) in (
        ("Reward", reward, ("mean of steps 26 to 30", "mean of steps 1 to 5")),
        ("Held-out exact", exact, ("step 30", "step 0")),
    ):
        moved = now - start
        tile = page.locator(".vitals > div", has=page.get_by_text(name, exact=True)).inner_text()
        assert _numbers(tile) == pytest.approx([now, moved, start], abs=6e-4)
        assert f"{of_now}, from " in tile
        assert f"({of_start})" in tile
        shown, title = table[name]
        assert _numbers(shown) == pytest.approx([now, moved], abs=6e-4)
        assert of_now in shown
        assert _numbers(title) == pytest.approx([start], abs=6e-4)
        assert title.endswith(f"({of_start})")
        line = next(line for line in terminal.splitlines() if line.startswith(name.lower()))
        assert _numbers(line) == pytest.approx([now, start, moved], abs=6e-4)
        assert f"{of_now}, from {of_start}" in terminal
        told = re.search(rf"{name}\s+([\d.]+)\s+{of_now}, (\S+) from (\S+) \({of_start}\)", report)
        assert [float(number) for number in told.groups()] == pytest.approx([now, moved, start], abs=6e-4)


def test_a_run_shorter_than_the_window_claims_no_change(page, address):  # noqa: F811
    _open(page, address, "#/run/short/overview", ".vitals")
    tile = page.locator(".vitals > div", has=page.get_by_text("Reward", exact=True))
    _expect(tile.locator(".more")).to_have_text("mean of steps 1 to 3")
    _expect(tile.locator(".delta")).to_have_count(0)


def test_the_figures_follow_a_run_that_goes_on_and_one_that_is_rolled_back(page, folder, address):  # noqa: F811
    told = Told(folder, "going").step(4)
    _open(page, address, "#/run/going/overview", ".vitals")
    more = page.locator(".vitals > div", has=page.get_by_text("Reward", exact=True)).locator(".more")
    _expect(more).to_have_text("mean of steps 1 to 4")
    told.step(8)
    _expect(more).to_have_text(re.compile(r"^mean of steps 8 to 12, from 0\.\d+ \(mean of steps 1 to 5\)$"))
    told.recorder.roll_back(3)
    _expect(more).to_have_text("mean of steps 1 to 3")
    told.let_go()
