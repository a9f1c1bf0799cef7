"""Figures and charts of the web app in a real browser, compared with the record. Needs Chromium; else skipped."""

import json
import re

import pytest
from test_ui_browser import _expect, _open, browser, page, pytestmark, tab, wait_until  # noqa: F401

from conversations import Talking, asked, rollout, turn
from headline_run import falling_lines, is_exact, is_reward, recorded_means, written_run
from paceline.observe.record import open_run
from paceline.observe.report.charts import CHARTS, run_charts
from paceline.observe.report.page import render_report
from paceline.observe.terminal import snapshot
from recorded_runs import Told, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    runs = tmp_path_factory.mktemp("runs")
    written_run(runs, "falling", falling_lines())
    written_run(runs, "short", falling_lines(3))
    for number in range(10):
        Told(runs, f"one-of-ten-{number}", staleness=number).step(12).end()
    Told(runs, "talk").step(5).end()
    talk = Talking(runs / "talk")
    for step in range(1, 11):
        plain = [rollout(step, n, [turn(asked(f"word {n}"), f"reply {step} {n}", step)], n / 8) for n in range(8)]
        talk.played(step, "trained", *plain)
    talk.close()
    many = Told(runs, "many").step(12)
    envs = {f"reward/an-environment-with-a-long-name-{number}/mean": number / 20 for number in range(19)}
    others = {"memory/trainer": 4e9, "eval/reverse-text/failed": 1.0, "my_own_figure": 3.0}
    for _ in range(3):
        many.done += 1
        many.recorder.step(many.done, envs | others | {"reward/reverse-text/mean": 0.5, "tokens/s": 1_234_567.0})
    many.end()
    return runs


@pytest.fixture(scope="module")
def address(folder):
    with served(folder) as here:
        yield here


@pytest.fixture(autouse=True)
def forgetful(page):  # noqa: F811
    """The browser remembers axis and smoothing from page to page, but not from test to test."""
    yield
    page.evaluate("localStorage.clear()")


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
    cells = {"Reward": row.nth(5), "Held-out exact": row.nth(7)}
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


SHOWN = re.compile(r"(-?[\d,]+(?:\.(\d+))?)(?:e(-?\d+))? ?(%|k|M|B|T|ms|s)?")
SCALE = {"": 1.0, "%": 0.01, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "ms": 1e-3, "s": 1.0}


def _range(text: str) -> tuple[float, float]:
    """The least and the largest number that is written so."""
    whole, digits, power, unit = SHOWN.fullmatch(text.replace("−", "-")).groups()
    scale = SCALE[unit or ""] * 10.0 ** int(power or 0)
    middle, half = float(whole.replace(",", "")), 0.501 * 10.0 ** -len(digits or "")
    return (middle - half) * scale, (middle + half) * scale


@pytest.mark.parametrize("name", ["talk", "many", "falling"])
def test_every_figure_of_an_overview_is_what_the_record_says(page, folder, address, name):  # noqa: F811
    """The last value of each curve of every chart, and the tiles, as text, against the lines of `metrics.jsonl`."""
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    names = list({key: None for line in lines for key in line})
    columns = {key: [line[key] for line in lines if line.get(key) is not None] for key in names}
    _open(page, address, f"#/run/{name}/overview", ".chart .legend b")
    for fold in page.locator("main details:not([open]) > summary:visible").all():
        fold.click()
    arranged = page.evaluate(
        """async (names) => (await import('/static/js/curves.js')).arrange(names)
          .flatMap(({ chart, curves }) => curves.map(({ name, label }) => [chart.title, label, name]))""",
        names,
    )
    metric = {(title, label): name for title, label, name in arranged}
    shown = page.evaluate("""() => [...document.querySelectorAll('main .chart')].flatMap((chart) =>
      [...chart.querySelectorAll('.legend button')].map((button) => [chart.querySelector('h3').textContent,
        button.querySelector('.label').textContent, button.querySelector('b').textContent]))""")
    for title, label, text in shown:
        least, most = _range(text)
        assert least <= columns[metric.pop((title, label))][-1] <= most, (title, label, text)
    rest = [name for (title, _), name in metric.items() if any(columns[name])]
    assert rest == [], "metrics without a figure, but for those that are always 0"
    tiles = dict(
        page.locator(".vitals > div").evaluate_all(
            "all => all.map((one) => "
            "[one.querySelector('dt').textContent, one.querySelector('dd').firstChild.textContent])"
        )
    )
    assert tiles["Step"].split()[0] == str(columns["step"][-1])
    for tile, key in (("Staleness", "staleness/mean"), ("Tokens a second", "tokens/s")):
        if key in columns:
            least, most = _range(tiles[tile])
            assert least <= sum(columns[key][-10:]) / len(columns[key][-10:]) <= most, tile


def test_the_report_has_the_charts_of_the_page_with_the_same_words_and_curves(page, folder, address):  # noqa: F811
    _open(page, address, "#/run/falling/overview", ".vitals")
    told = page.evaluate("""async () => (await import('/static/js/curves.js')).CHARTS.map(
      ({ title, unit, hint, pattern }) => [title, unit, hint, pattern.source])""")
    same = [[spec.title, spec.unit, spec.hint, f"^{spec.pattern.replace('?P<', '?<')}$"] for spec in CHARTS]
    assert same == [[*words, pattern.replace("\\/", "/")] for *words, pattern in told]
    for name in ("falling", "many", "talk"):
        run = open_run(folder / name)
        arranged = page.evaluate(
            """async (names) => (await import('/static/js/curves.js')).arrange(names)
              .filter(({ chart }) => chart.section !== 'Other')
              .map(({ chart, curves }) => [chart.title, curves.map(({ label }) => label)])""",
            [name for name, column in run.metrics().items() if any(value is not None for value in column)],
        )
        shown = {
            chart["title"]: ([curve["name"] for curve in chart["curves"]], chart["more"]) for chart in run_charts(run)
        }
        assert len(shown) > 2
        for title, labels in arranged:
            mine, more = shown.pop(title, ([], 0))
            assert set(mine) <= set(labels)
            spec = next(spec for spec in CHARTS if spec.title == title)
            assert spec.nonzero or len(mine) + more == len(labels), title
        assert shown == {}


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


SAME_PAIRS = """async () => {
  const { distinct, swatch } = await import('/static/js/chart/draw.js');
  const series = [
    ...Array.from({ length: 40 }, (_, colour) => ({ colour })),
    { colour: 3, dash: 0 }, { colour: 3, dash: 1 }, { colour: 11, dash: 0 },
  ];
  const drawn = distinct(series);
  const signs = drawn.map((one) => swatch(one).style.cssText);
  const pairs = drawn.map(({ colour, dash }) => `${colour} ${dash}`);
  return [pairs, signs, series.map(({ colour }) => colour % 8), drawn.map(({ colour }) => colour)];
}"""


def test_no_two_curves_of_a_chart_share_colour_and_dash(page, address):  # noqa: F811
    _open(page, address, "#/", "table.runs tbody tr")
    pairs, signs, wanted, given = page.evaluate(SAME_PAIRS)
    assert pairs[:9] == [*(f"{colour} 0" for colour in range(8)), "0 1"]
    assert len(set(pairs)) == len(pairs) == 43
    assert len(set(signs)) == len(signs), "the legend tells them apart too"
    assert given == wanted, "the colour stays, so that an environment has one in all charts"


def test_from_the_ninth_run_on_a_comparison_dashes_its_curves(page, address):  # noqa: F811
    runs = "&".join(f"run=one-of-ten-{number}" for number in range(10))
    _open(page, address, f"#/compare?{runs}", ".chart canvas")
    _looks(page, ".picked .swatch", 10)
    chart = page.get_by_role("region", name="Reward", exact=True)
    assert _looks(page, ".picked .swatch", 10) == chart.locator(".legend .swatch").evaluate_all(LOOKS)


LOOKS = "(all) => all.map((one) => one.style.cssText)"


def _looks(page, place: str, count: int) -> list[str]:  # noqa: F811
    found = page.locator(place).evaluate_all(LOOKS)
    assert len(set(found)) == len(found) == count
    return found


CUT = """() => [...document.querySelectorAll('.chart :is(h3, .hint, .legend, .legend button, .label)')]
  .filter((one) => one.offsetParent)
  .filter((one) => one.scrollWidth > one.clientWidth + 1 || one.scrollHeight > one.clientHeight + 1)
  .filter((one) => getComputedStyle(one).overflow !== 'visible' || getComputedStyle(one).textOverflow === 'ellipsis')
  .map((one) => one.textContent)"""


@pytest.mark.parametrize("width", [1440, 390])
def test_titles_and_legends_are_shown_whole(page, address, width):  # noqa: F811
    page.set_viewport_size({"width": width, "height": 900})
    _open(page, address, "#/run/many/overview", ".chart canvas")
    chart = page.get_by_role("region", name="Reward", exact=True)
    _expect(chart.locator(".legend .label")).to_have_count(20)
    assert page.evaluate(CUT) == []
    right = "(all) => Math.max(...all.map((one) => one.getBoundingClientRect().right))"
    box = chart.bounding_box()
    assert chart.locator(".legend button").evaluate_all(right) <= box["x"] + box["width"]
    _looks(page, ".chart[aria-label=Reward] .legend .swatch", 20)


DRAWN_AT_THE_EDGE = """async () => {
  const { axisRoom, drawAxes, drawLines, layout, scaleCanvas } = await import('/static/js/chart/draw.js');
  const { seconds } = await import('/static/js/format.js');
  const canvas = document.createElement('canvas');
  canvas.style.cssText = 'position: fixed; width: 300px; height: 150px';
  document.body.append(canvas);
  const { context, width, height } = scaleCanvas(canvas);
  const series = [{ colour: 0, xs: [0, 1, 2], ys: [0, 0, 0.5] }];
  const options = { zoom: null, smoothing: 0, log: false, min: 0 };
  const plan = layout(series, width, height, options);
  drawLines(context, plan, series, options);
  const ratio = canvas.width / width;
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  const alpha = (x, y) => data[4 * (Math.round(y * ratio) * canvas.width + Math.round(x * ratio)) + 3];
  const at = (place, dx, dy) => alpha(plan.toX(series[0].xs[place]) + dx, plan.toY(series[0].ys[place]) + dy);
  const inked = [at(0, -1.5, 0), at(2, 1.2, 0), at(1, 0, 1.2)].map((ink) => ink > 60);
  const long = layout([{ xs: [0, 1], ys: [100, 6000] }], width, height, options);
  const room = axisRoom(context, long, { format: seconds });
  canvas.remove();
  return { inked, room: room >= context.measureText('66 min 40 s').width + 7 };
}"""


def test_points_at_the_edge_and_long_axis_values_are_drawn_whole(page, address):  # noqa: F811
    _open(page, address, "#/", "table.runs tbody tr")
    assert page.evaluate(DRAWN_AT_THE_EDGE) == {"inked": [True, True, True], "room": True}


def test_smoothing_leaves_held_out_values_as_they_were_measured(page, folder, address):  # noqa: F811
    exact = recorded_means(folder / "falling", lambda name: name == "eval/letters/exact")
    _open(page, address, "#/run/falling/overview", ".chart canvas")
    held_out = page.get_by_role("region", name="Held-out evaluation", exact=True)
    reward = page.get_by_role("region", name="Reward", exact=True)
    entry = held_out.locator(".legend button", has_text="letters").locator("b")
    smoothed, before = reward.locator(".legend b").first, reward.locator(".legend b").first.inner_text()
    page.get_by_label("Smoothing").fill("0.9")
    _expect(smoothed).not_to_have_text(before)
    assert float(entry.inner_text()) == pytest.approx(exact[-1][1], abs=6e-4)
    box = held_out.get_by_role("slider").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 40)
    tip = held_out.locator(".tip .entry", has_text="letters").locator("b")
    _expect(tip).to_have_text(entry.inner_text())
    values = """import('/static/js/chart/scale.js').then(({ shownValues }) =>
      [true, false].map((heldOut) => shownValues({ heldOut, ys: [0, 1] }, 0.5)))"""
    kept, moved = page.evaluate(values)
    assert kept == [0, 1]
    assert moved[1] < 1


WITHOUT_A_UNIT = {
    "Loss by component",  # each component has its own
    "Gradient norm",
    "Learning rate",
    "Environment metrics",
    "Replayed groups",
    "Size of a batch",
    "Mixture of the data",
    "Other held-out measures",
    "my_own_figure",
}


def test_every_chart_names_its_unit_and_other_metrics_have_a_title(page, address):  # noqa: F811
    _open(page, address, "#/run/many/overview", ".chart canvas")
    page.locator("summary", has_text="Other metrics").click()
    plain = page.locator(".chart:not(.lanes):not(:has(.unit)) h3").all_inner_texts()
    assert set(plain) <= WITHOUT_A_UNIT
    units = dict(
        page.locator(".chart:has(.unit)").evaluate_all(
            "(all) => all.map((one) => [one.ariaLabel, one.querySelector('.unit').textContent])"
        )
    )
    assert (
        units.items()
        >= {
            "Throughput": "tokens/s",
            "Entropy": "nats a token",
            "Staleness": "versions",
            "Length": "tokens",
            "Busy and waiting": "share of the step",
            "Time of a step, by part": "seconds",
            "Memory": "bytes",
            "Engine": "requests",
            "Engine's KV cache": "share",
            "Spread of rewards": "reward",
        }.items()
    )
    _expect(page.locator(".lanes .hint")).to_contain_text("share of the time")
    others = page.locator("details .charts h3").all_inner_texts()
    assert set(others) == {
        "Size of a batch",
        "Other held-out measures",
        "Time of a step",
        "my_own_figure",
    }


def _place(page) -> str:  # noqa: F811
    return page.evaluate("location.hash")


def _view(page) -> tuple[str, str, bool]:  # noqa: F811
    """Axis, smoothing and whether the charts are zoomed, as the controls say."""
    axis = page.locator(".choice button[aria-pressed=true]").inner_text()
    zoomed = page.get_by_role("button", name="Show all steps").is_visible()
    return axis, page.get_by_label("Smoothing").input_value(), zoomed


@pytest.mark.parametrize(
    ("place", "wanted"),
    [("#/run/falling/overview", ".chart canvas"), ("#/compare?run=one-of-ten-1&run=one-of-ten-2", ".chart canvas")],
)
def test_zoom_axis_and_smoothing_are_in_the_address_and_come_back(page, browser, address, place, wanted):  # noqa: F811
    _open(page, address, place, wanted)
    assert _view(page) == ("step", "0", False)
    assert _place(page) == place, "the default view needs no words in the address"
    page.locator(".choice button", has_text="time").click()
    page.get_by_label("Smoothing").fill("0.6")
    page.get_by_role("slider", name="Reward: cursor", exact=True).focus()
    page.keyboard.press("+")
    page.get_by_role("button", name="Show all steps").wait_for()
    changed = _place(page)
    assert changed.startswith(place)
    assert "axis=time&smoothing=0.6&from=" in changed
    page.evaluate("location.hash = '#/'")
    page.wait_for_selector("table.runs tbody tr")
    page.go_back()
    page.wait_for_selector(wanted)
    assert (_place(page), _view(page)) == (changed, ("time", "0.6", True))
    table = page.get_by_role("button", name="Show as a table: Reward", exact=True)
    table.click()
    rows = page.get_by_role("region", name="Reward as a table").locator("tbody tr")
    zoomed = rows.all_inner_texts()
    page.evaluate("localStorage.clear()")
    shared = browser.new_page()
    _open(shared, address, changed, wanted)
    assert _view(shared) == ("time", "0.6", True)
    shared.get_by_role("button", name="Show as a table: Reward", exact=True).click()
    assert shared.get_by_role("region", name="Reward as a table").locator("tbody tr").all_inner_texts() == zoomed
    shared.close()
    page.get_by_role("button", name="Show all steps").click()
    page.locator(".choice button", has_text="step").click()
    page.get_by_label("Smoothing").fill("0")
    assert _place(page) == place
    assert len(zoomed) < rows.count()


@pytest.mark.parametrize("view", ["axis=never", "smoothing=x", "smoothing=7", "from=9&to=3", "from=&to=x"])
def test_a_view_of_nonsense_in_the_address_shows_the_charts(page, address, view):  # noqa: F811
    _open(page, address, f"#/run/falling/overview?{view}", ".chart canvas")
    axis, smoothing, zoomed = _view(page)
    assert (axis, zoomed) == ("step", False)
    assert 0 <= float(smoothing) <= 0.98


def _comes_back_to(page, row: str, opened: str) -> None:  # noqa: F811
    """Open the link of a row far below, go back and forward: the list stands where it was left."""
    link = page.locator(f"{row} a").first
    link.scroll_into_view_if_needed()
    left = page.evaluate("scrollY")
    assert left > 0
    link.click()
    page.wait_for_selector(opened)
    wait_until(page, "scrollY === 0")
    page.go_back()
    page.wait_for_selector(row)
    wait_until(page, f"scrollY === {left}")
    page.go_forward()
    page.wait_for_selector(opened)
    wait_until(page, "scrollY === 0")
    page.go_back()
    page.wait_for_selector(row)
    wait_until(page, f"scrollY === {left}")


def test_back_finds_the_list_of_rollouts_as_it_was_left(page, address):  # noqa: F811
    page.set_viewport_size({"width": 1440, "height": 500})
    _open(page, address, "#/run/talk/rollouts", "table.rollouts tbody tr")
    page.locator("table.rollouts thead button", has_text="Reward").click()
    _expect(page.locator("table.rollouts th[aria-sort]")).to_contain_text("Reward")
    page.wait_for_selector("table.rollouts tbody tr:nth-child(30)")
    _comes_back_to(page, "table.rollouts tbody tr:nth-child(30)", ".message")
    _expect(page.locator("table.rollouts th[aria-sort]")).to_contain_text("Reward")


def test_back_finds_the_table_of_runs_as_it_was_left(page, address):  # noqa: F811
    page.set_viewport_size({"width": 1440, "height": 400})
    _open(page, address, "#/", "table.runs tbody tr")
    page.get_by_role("button", name="Run", exact=True).click()
    names = page.locator("table.runs td.name a").all_inner_texts()
    assert names == sorted(names)
    _comes_back_to(page, "tr[data-key=one-of-ten-7]", ".vitals")
    assert page.locator("table.runs td.name a").all_inner_texts() == names


def test_a_chart_out_of_sight_is_drawn_when_it_is_scrolled_to(page, address):  # noqa: F811
    page.set_viewport_size({"width": 800, "height": 400})
    page.goto(f"{address}/#/run/many/overview")
    blank = """(one) => { const context = one.getContext("2d", { willReadFrequently: true });
      return context.getImageData(0, 0, one.width, one.height).data.every((value) => !value); }"""
    first, last = (
        page.locator(".chart canvas").first,
        page.get_by_role("region", name="Throughput").locator("canvas").first,
    )
    first.scroll_into_view_if_needed()
    wait_until(page, "(one) => one.width !== 300", arg=first.element_handle())
    assert last.evaluate("(one) => one.width") == 300, "as a canvas is made"
    last.scroll_into_view_if_needed()
    wait_until(page, "(one) => one.width !== 300", arg=last.element_handle())
    assert not last.evaluate(blank)
    assert not first.evaluate(blank)


def test_every_metric_of_the_user_has_a_chart_titled_with_its_key(page, folder, address):  # noqa: F811
    own = Told(folder, "own").step(3)
    lines = {
        "metric/reverse-text/palindromes": 0.5,
        "tools/search/calls": 2.0,
        "tools/search/failed": 1.0,
        "my_figure": 3.0,
    }
    for _ in range(2):
        own.done += 1
        own.recorder.step(
            own.done, lines | {"memory/trainer": 4e9, "critic/loss": 1.0, "eval/reverse-text/failed": 1.0}
        )
    page.goto(f"{address}/#/run/own/metrics")
    _expect(page.locator(".section h2")).to_have_text(["Without a prefix", "metric/reverse-text", "tools/search"])
    titles = ["my_figure", "metric/reverse-text/exact", *sorted(lines)[:1], "tools/search/calls", "tools/search/failed"]
    _expect(page.locator(".chart h3")).to_have_text(titles)
    _expect(page.locator(".chart .legend b").last).to_have_text("1")
    page.get_by_label("Find a chart").fill("failed")
    _expect(page.locator(".chart:visible h3")).to_have_text(["tools/search/failed"])
    page.get_by_label("Find a chart").fill("")
    own.recorder.step(own.done + 1, {"tools/browse/pages": 7.0})
    _expect(page.locator(".section h2", has_text="tools/browse")).to_be_visible()
    own.end()
