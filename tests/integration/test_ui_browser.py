"""The web app in a real browser: every page, on a living, a finished and a crashed run.

Needs Chromium (`apt install chromium`); where there is none these tests are skipped and say so.
"""

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from recorded_runs import Told, served, torn
from token_run import tokened

playwright = pytest.importorskip("playwright.sync_api", reason="the `dev` extra is not installed: no playwright")

CHROMIUM = os.environ.get("PACELINE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed, so the web app is not driven: `apt install chromium`"
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOSTILE = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'
SIZE = {"width": 1440, "height": 900}
PATIENCE = 60_000
"""Milliseconds that a page may take; a busy machine is slow."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    runs = tmp_path_factory.mktemp("runs")
    now = time.time()
    for seed in range(3):
        Told(runs, f"seed-{seed}", seed=seed, began=now - 5000).step(40).end()
    Told(runs, "finished", began=now - 4000, staleness=0).step(40).note(HOSTILE).end()
    torn(Told(runs, "crashed", began=now - 3000).step(23).let_go().path / "metrics.jsonl")
    Told(runs, "failed", began=now - 2000).step(5).end("failed", f"bad reward {HOSTILE}")
    living = Told(runs, "living", began=now - 30).step(15)
    Told(runs, "empty", began=now - 1000).let_go()
    (runs / "empty" / "metrics.jsonl").unlink()
    tokened(runs, "said-finished", began=now - 900).end()
    tokened(runs, "said-crashed", began=now - 800).let_go()
    saying = tokened(runs, "said-living", began=now - 20)
    yield runs
    living.let_go()
    saying.let_go()


@pytest.fixture(scope="module")
def address(folder: Path):
    with served(folder) as here:
        yield here


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    with playwright.sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"),
            executable_path=CHROMIUM,
            headless=True,
            args=FLAGS,
            viewport=SIZE,
            timeout=2 * PATIENCE,
        )
        context.set_default_timeout(PATIENCE)
        playwright.expect.set_options(timeout=PATIENCE)
        yield context
        context.close()


@pytest.fixture(scope="module")
def tab(browser):
    """One for all tests: to load the app anew costs ten times what going from page to page does."""
    opened = browser.new_page()
    yield opened
    opened.close()


@pytest.fixture
def page(tab, address):
    """A page whose console must stay silent and which sends requests only to our server."""
    wrong: list[str] = []
    listeners = {
        "console": lambda told: wrong.append(told.text) if told.type in ("error", "warning") else None,
        "pageerror": lambda error: wrong.append(str(error)),
        "request": lambda asked: None if asked.url.startswith((address, "data:")) else wrong.append(asked.url),
    }
    for what, listener in listeners.items():
        tab.on(what, listener)
    tab.emulate_media(color_scheme="light")
    tab.set_viewport_size(SIZE)
    yield tab
    leave(tab)
    for what, listener in listeners.items():
        tab.remove_listener(what, listener)
    assert wrong == []


def leave(page) -> None:
    """Go where no run is shown, so that whatever stands there next was drawn anew."""
    if page.url.endswith("#/nowhere"):
        return
    page.mouse.move(0, 0)
    page.evaluate("location.hash = '#/nowhere'")
    page.wait_for_selector(".notice:has-text('There is no page \"nowhere\"')")
    page.evaluate("document.getElementById('main').replaceChildren()")


def _expect(locator):
    return playwright.expect(locator)


def wait_until(page, expression: str, arg=None) -> None:
    """Ask again and again from here: what the browser would evaluate later by itself, the page's policy refuses."""
    deadline = time.monotonic() + 60
    while not page.evaluate(expression, arg):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)


def _open(page, address: str, place: str, wanted: str) -> None:
    page.goto(f"{address}/{place}")
    page.wait_for_selector(wanted)


RUNS = "table.runs tbody tr"
SIDEWAYS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
PAGES = {
    "overview": {"": ".vitals"},
    "metrics": {"": ".chart canvas"},
    "advice": {"": ".advice table.list"},
    "rollouts": {
        "": "table.rollouts tbody tr",
        "?id=1": ".message",
        "?id=1&view=group": ".columns .try",
    },
    "tokens": {"": ".token-chip"},
    "tickets": {"": "tbody tr", "?ticket=2": ".ticket-life"},
    "replay": {"": "form.controls"},
    "config": {"": "table.config"},
}
"""Every page of a run, its views, and what is there once it is drawn."""
FOLDER_PAGES = {
    "runs": {"": RUNS},
    "compare": {"?run=seed-0&run=seed-1&run=seed-2&run=finished": ".chart canvas"},
    "diff": {"?a=seed-0&b=seed-1": "main table.differs", "?a=seed-0&b=seed-1&exact=1": "main .difference-side"},
    "ab": {"?a=said-finished&b=said-crashed": ".charts .chart:not([hidden]) canvas"},
}
BARE = {
    "overview": ".vitals",
    "metrics": "h1",
    "rollouts": ".empty",
    "tokens": ".empty:has-text('No rollout is recorded yet.')",
    "tickets": ".empty:has-text('No ticket')",
    "replay": ".empty:has-text('Nothing to replay')",
}
"""What pages say of a run that ended before anything was kept."""


def _in_both_themes(page, place: str) -> None:
    """A page as it was opened, and after the system changed its mind."""
    first = page.evaluate("document.documentElement.dataset.theme")
    for theme in (first, "dark" if first == "light" else "light"):
        page.emulate_media(color_scheme=theme)
        page.wait_for_selector(f"html[data-theme={theme}]")
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        bright = sum(map(int, re.findall(r"\d+", ground)[:3])) / 3
        assert bright > 200 if theme == "light" else bright < 60, f"{place} is not {theme}"
        assert page.title().endswith("Paceline")
        assert page.locator("main h1").count() == 1, place
        assert not page.evaluate(SIDEWAYS), f"{place} scrolls sideways"


@pytest.mark.parametrize("run", ["said-living", "said-finished", "said-crashed"])
def test_every_page_of_a_run_opens_without_a_complaint_in_both_themes(page, address, run):
    for name, views in PAGES.items():
        for view, wanted in views.items():
            place = f"#/run/{run}/{name}{view}"
            _open(page, address, place, f"body:has(#tabs a[aria-current=page][href$='/{name}']) main {wanted}")
            _in_both_themes(page, place)
    _expect(page.locator("#trail .pill")).to_have_text({"living": "running"}.get(run[5:], run[5:]))


def test_every_page_of_the_folder_opens_without_a_complaint_in_both_themes(page, address):
    for name, views in FOLDER_PAGES.items():
        for view, wanted in views.items():
            _open(page, address, f"#/{name}{view}", wanted)
            _in_both_themes(page, name)
    known = "import('/static/js/pages.js').then((all) => [Object.keys(all.RUN_PAGES), Object.keys(all.FOLDER_PAGES)])"
    assert page.evaluate(known) == [list(PAGES), list(FOLDER_PAGES)], "a page that no test drives"


def test_every_page_of_a_run_that_kept_nothing_opens_without_a_complaint(page, address):
    for run in ("failed", "empty"):
        for name, wanted in BARE.items():
            here = f"body:has(#tabs a[aria-current=page][href$='/{run}/{name}'])"
            _open(page, address, f"#/run/{run}/{name}", f"{here} main {wanted}")
            _in_both_themes(page, f"{run}/{name}")


def test_the_theme_button_is_remembered(page, address):
    page.emulate_media(color_scheme="light")
    _open(page, address, "#/", RUNS)
    page.get_by_role("button", name="Use the dark theme").click()
    page.reload()
    page.wait_for_selector(RUNS)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.get_by_role("button", name="Use the light theme").click()
    page.evaluate("localStorage.clear()")


def test_words_of_a_run_never_become_markup(page, address):
    for run in ("finished", "failed"):
        _open(page, address, f"#/run/{run}/overview", ".events td")
        assert HOSTILE in page.locator("main").inner_text()
        assert page.locator("main img").count() == 0
        assert page.title() != "owned"


def test_what_could_not_be_read_and_why_a_run_ended_stand_on_top(page, address):
    _open(page, address, "#/run/crashed/overview", ".notice")
    _expect(page.locator(".notice", has_text="Crashed at step 23")).to_be_visible()
    _expect(page.locator(".notice", has_text="damaged")).to_be_visible()
    _open(page, address, "#/run/empty/overview", ".empty")
    _expect(page.locator(".empty:visible")).to_contain_text("No step was finished")


def test_new_steps_appear_by_themselves_and_charts_stay_in_place(page, folder, address):
    told = Told(folder, "growing", began=time.time() - 10).step(5)
    _open(page, address, "#/run/growing/overview", ".chart canvas")
    page.evaluate("window.kept = document.querySelector('.chart canvas')")
    _expect(page.locator(".vitals")).to_contain_text("5 of 40")
    told.step(7)
    _expect(page.locator(".vitals")).to_contain_text("12 of 40")
    assert page.evaluate("window.kept === document.querySelector('.chart canvas')"), "a chart is drawn on, not replaced"
    told.recorder.roll_back(4)
    _expect(page.locator(".vitals")).to_contain_text("4 of 40")
    _expect(page.get_by_role("slider", name="Reward: cursor")).to_have_attribute("aria-valuemax", "4")
    told.let_go()
    page.wait_for_selector(".notice:has-text('Crashed')")
    _expect(page.locator("#trail .pill")).to_have_text("crashed")


def test_the_table_grows_with_a_new_run(page, folder, address):
    _open(page, address, "#/", RUNS)
    told = Told(folder, "brand-new").step(1)
    page.wait_for_selector("tr[data-key='brand-new'] .pill.running")
    page.evaluate("window.kept = document.querySelector('tr[data-key=\"brand-new\"] a')")
    told.step(2)
    _expect(page.locator("tr[data-key='brand-new']")).to_contain_text("3 / 40")
    same = "window.kept === document.querySelector('tr[data-key=\"brand-new\"] a')"
    assert page.evaluate(same), "what did not change is left alone, or a click on it would be lost"
    told.end()
    page.wait_for_selector("tr[data-key='brand-new'] .pill.finished")


def test_keys_alone_find_runs_tick_them_and_compare(page, address):
    _open(page, address, "#/", RUNS)
    page.keyboard.press("/")
    page.keyboard.type("seed-")
    _expect(page.locator("table.runs tbody tr")).to_have_count(3)
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "TR":
            break
    assert page.evaluate("document.activeElement.tagName") == "TR"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    for _ in range(3):
        page.keyboard.press(" ")
        page.keyboard.press("ArrowDown")
    page.get_by_role("button", name="Compare 3 runs").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("text=3 seeds")
    _expect(page.locator(".differs th[scope=row]")).to_have_text(["seed"])
    page.goto(f"{address}/#/")
    page.wait_for_selector(RUNS)
    page.get_by_role("button", name="Untick all").click()
    page.locator("tr[data-key='crashed']").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".vitals")
    assert "crashed" in page.url


def test_a_chart_speaks_under_the_pointer_and_under_the_arrow_keys(page, address):
    _open(page, address, "#/run/finished/overview", ".chart canvas")
    plot = page.get_by_role("slider", name="Reward: cursor")
    plot.hover()
    page.wait_for_selector(".tip:visible >> text=step")
    plot.focus()
    page.keyboard.press("Home")
    first = plot.get_attribute("aria-valuetext")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    third = plot.get_attribute("aria-valuetext")
    assert first.startswith("step 1: reverse-text ")
    assert third.startswith("step 3: reverse-text ")
    page.keyboard.press("+")
    page.get_by_role("button", name="Show all steps").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Show all steps").wait_for(state="hidden")


def test_a_drag_zooms_all_charts_and_the_table_follows(page, address):
    _open(page, address, "#/run/finished/overview", ".chart canvas")
    page.get_by_role("button", name="Show as a table: Reward").click()
    rows = page.locator(".chart.lead").first.locator(".figures tbody tr")
    _expect(rows).to_have_count(40)
    box = page.get_by_role("slider", name="Reward: cursor").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=4)
    page.mouse.up()
    page.get_by_role("button", name="Show all steps").wait_for()
    _expect(rows).not_to_have_count(40)
    assert 3 < rows.count() < 20
    page.get_by_role("button", name="Show all steps").click()
    _expect(rows).to_have_count(40)


def test_no_spike_is_lost_however_few_the_pixels(page, address):
    _open(page, address, "#/", RUNS)
    found = page.evaluate("""async () => {
      const { thin } = await import('/static/js/chart/scale.js');
      const xs = Array.from({length: 20000}, (_, at) => at);
      const ys = xs.map((x) => Math.sin(x / 500));
      ys[12345] = 9; ys[777] = -9;
      const kept = thin(xs, ys, 0, xs.length, (x) => x / 100, 200);
      return { count: kept.length, high: kept.includes(12345), low: kept.includes(777), ends: [kept[0], kept.at(-1)] };
    }""")
    assert found.pop("count") <= 800
    assert found == {"high": True, "low": True, "ends": [0, 19_999]}


def test_two_seeds_are_their_mean_between_the_lower_and_the_higher(page, address):
    _open(page, address, "#/", RUNS)
    found = page.evaluate("""async () => {
      const { families, joinCurves } = await import('/static/js/seeds.js');
      const runs = [{ name: 'a-seed0', family: 'x' }, { name: 'b', family: '' }, { name: 'a-seed1', family: 'x' }];
      const curves = [{ xs: [1, 2, 3], ys: [0, 2, 4], heldOut: true }, { xs: [1, 2], ys: [2, 6], heldOut: true }];
      return [families(runs).map(({ label, runs }) => [label, runs.length]), joinCurves(curves, 'step')];
    }""")
    assert found[0] == [["a", 2], ["b", 1]]
    assert found[1].pop("heldOut"), "a mean of held-out values is not smoothed either"
    assert found[1] == {"xs": [1, 2, 3], "ys": [1, 4, 4], "low": [0, 2, 4], "high": [2, 6, 4]}


def test_smoothing_neither_starts_at_zero_nor_moves_a_constant(page, address):
    _open(page, address, "#/", RUNS)
    found = page.evaluate("""async () => {
      const { smoothed } = await import('/static/js/chart/scale.js');
      return [smoothed([3, 3, 3], 0.9), smoothed([1, 5], 0.5), smoothed([1, 5], 0)];
    }""")
    assert found[0] == pytest.approx([3, 3, 3])
    assert found[1] == pytest.approx([1, 11 / 3])
    assert found[2] == [1, 5]


def test_curves_can_be_hidden_and_scaled(page, address):
    _open(page, address, "#/run/finished/overview", ".chart canvas")
    chart = page.get_by_role("region", name="Held-out evaluation", exact=True)
    entry = chart.get_by_role("button", name="exact")
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    log = chart.get_by_role("button", name="Logarithmic scale: Held-out evaluation")
    log.click()
    assert log.get_attribute("aria-pressed") == "true"
    page.keyboard.press("/")
    page.keyboard.type("entropy")
    _expect(page.locator(".chart:visible h3")).to_have_text(["Entropy"])


def test_dropped_tickets_and_lanes_are_drawn(page, address):
    _open(page, address, "#/run/finished/overview", ".chart.lanes canvas")
    chart = page.get_by_role("region", name="Dropped, by reason", exact=True)
    _expect(chart.locator(".legend .label")).to_have_text(["zero advantage", "stale"])
    lanes = page.get_by_role("region", name="What each part did over time", exact=True)
    lanes.get_by_role("button", name="Show as a table").click()
    shown = lanes.locator(".figures tbody th").all_inner_texts()
    assert {"engine", "trainer", "publish", "evaluation"} <= set(shown)
    colours = """() => { const canvas = document.querySelector('.lanes canvas');
      const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      return new Set(Array.from({length: data.length / 4}, (_, at) => data.slice(4 * at, 4 * at + 3).join())).size; }"""
    wait_until(page, f"({colours})() > 5")


def test_the_config_page_marks_and_filters_what_differs(page, address):
    _open(page, address, "#/run/finished/config", "table.config")
    everything = page.locator("tr:has(th[scope=row])").count()
    page.get_by_label("only what differs").check()
    names = page.locator("tr.changed th[scope=row]").all_inner_texts()
    assert any(name.startswith("staleness") for name in names)
    assert page.locator("tr:has(th[scope=row])").count() == len(names) < everything
    page.get_by_label("only what differs").uncheck()
    page.get_by_role("button", name="as file").click()
    assert "staleness = 0" in page.locator("pre.raw").inner_text()


def test_landmarks_labels_and_tab_order_lead_through_a_run(page, address):
    _open(page, address, "#/run/finished/overview", ".chart canvas")
    page.reload()
    page.wait_for_selector(".chart canvas")
    for role in ("banner", "main"):
        assert page.get_by_role(role).count() == 1
    assert page.get_by_role("navigation", name="Pages of this run").get_by_role("link").count() >= 2
    assert page.locator("#said[aria-live=polite]").count() == 1
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent"))
    assert seen[0] == "Find a chart"
    assert "Reward: cursor" in seen
    unnamed = """[...document.querySelectorAll('button, input, a, [tabindex="0"]')].filter((one) => one.offsetParent
      && !(one.ariaLabel || one.textContent.trim() || one.closest('label')?.textContent.trim())).length"""
    assert page.evaluate(unnamed) == 0


def test_a_page_that_is_not_there_says_so(browser, address):
    """Not with the silent page: the browser itself notes the 404 of a run that is gone."""
    page = browser.new_page()
    for place, words in (
        ("#/run/nobody/overview", "there is no run `nobody`"),
        ("#/run/finished/nothing", 'There is no page "nothing"'),
        ("#/run/%E0%A4%A/overview", "there is no run"),
        ("#/compare", "No run was chosen"),
    ):
        _open(page, address, place, ".notice")
        assert words in page.locator(".notice").inner_text()
        page.goto("about:blank")
    page.close()


def test_a_key_is_asked_for_once(browser, folder):
    with served(folder, "s3cret") as here:
        page = browser.new_page()
        page.goto(here)
        page.get_by_label("Key").fill("s3cret")
        page.get_by_role("button", name="Show the runs").click()
        page.wait_for_selector("table.runs tbody tr")
        assert "s3cret" not in page.url
        page.reload()
        page.wait_for_selector("table.runs tbody tr")
        page.close()
