"""The file of `paceline report`, opened in a real browser from the disk, as a colleague does.

Needs Chromium (`apt install chromium`); where there is none these tests are skipped and say so.
"""

import re
import socket
from pathlib import Path

import pytest
from test_ui_browser import HOSTILE, browser, pytestmark  # noqa: F401 - a fixture and a mark, used by their names

from paceline.observe.record import open_run
from paceline.observe.report.page import render_report as told
from recorded_runs import Told, torn
from token_run import tokened

LOADED = '<script>document.title="owned"</script><img src="http://evil.test/x" onerror="document.title=\'owned\'">'
"""What an escape that failed would let in."""
DRESSED = '<style>body { display: none; }</style><p style="color: red" id="dressed">words</p>'


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    runs = tmp_path_factory.mktemp("runs")
    tokened(runs).note(HOSTILE).end()
    torn(Told(runs, "crashed").step(23).note(HOSTILE).let_go().path / "metrics.jsonl")
    plain = Told(runs, "plain").step(12)
    says = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": f"```html\n{LOADED}\n```"}]
    plain.recorder.rollouts(12, [{"env": HOSTILE, "ticket": n, "reward": n, "messages": says} for n in range(4)])
    plain.end("failed", f"bad reward {HOSTILE}")
    files = {}
    for name in ("tokens", "crashed", "plain"):
        files[name] = runs / f"{name}.html"
        files[name].write_text(told(open_run(runs / name), 2), encoding="utf-8")
    return files


@pytest.fixture
def quiet(browser):  # noqa: F811
    """A page, and all that it complained of or asked anybody for."""
    opened, heard = browser.new_page(), []
    opened.on("console", lambda told: heard.append(told.text))
    opened.on("pageerror", lambda error: heard.append(str(error)))
    opened.on("dialog", lambda dialog: (heard.append(dialog.message), dialog.dismiss()))
    opened.on("request", lambda asked: None if asked.url.startswith("file:") else heard.append(asked.url))
    yield opened, heard
    opened.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["tokens", "crashed", "plain"])
def test_a_report_opens_from_the_disk_runs_nothing_and_sends_no_request(quiet, reports, name, theme):
    page, heard = quiet
    page.emulate_media(color_scheme=theme)
    page.goto(reports[name].as_uri())
    assert page.title() == f"{name}: a run of Paceline"
    assert page.locator("h1").count() == 1
    assert page.locator("script, img, iframe, link, a").count() == 0
    assert page.get_by_text("owned").count() > 0 or name == "tokens", "hostile words are there, as words"
    assert page.locator("svg[role=img]").count() > 3
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = sum(map(int, re.findall(r"\d+", ground)[:3])) / 3
    assert bright > 200 if theme == "light" else bright < 60, "the style was let in by its hash"
    assert heard == []


def test_a_report_fits_a_narrow_screen_and_prints_on_white(quiet, reports):
    page, _ = quiet
    page.set_viewport_size({"width": 420, "height": 800})
    page.emulate_media(color_scheme="dark")
    page.goto(reports["plain"].as_uri())
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_markup_that_got_in_all_the_same_would_neither_run_nor_load(quiet, reports, tmp_path):
    page, heard = quiet
    spoiled = tmp_path / "spoiled.html"
    with socket.create_server(("127.0.0.1", 0)) as server:
        loaded = LOADED.replace("evil.test", f"127.0.0.1:{server.getsockname()[1]}")
        spoiled.write_text(reports["tokens"].read_text().replace("</main>", f"{loaded}{DRESSED}</main>"))
        page.goto(spoiled.as_uri())
        assert page.title() == "tokens: a run of Paceline"
        assert page.evaluate("getComputedStyle(document.body).display") == "block"
        assert page.evaluate("getComputedStyle(document.getElementById('dressed')).color") != "rgb(255, 0, 0)"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert len([word for word in heard if "Content Security Policy" in word]) >= 4, "each was refused, and said so"
