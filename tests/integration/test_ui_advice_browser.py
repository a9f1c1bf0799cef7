"""The page of advisories in a real browser. Needs Chromium; where there is none these tests are skipped and say so."""

import pytest
from test_ui_browser import _expect, _open, browser, page, pytestmark, tab  # noqa: F401

from advice_runs import DEFECTS, Plot
from paceline.observe.record.advice import RULES
from recorded_runs import Told, served

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    runs = tmp_path_factory.mktemp("runs")
    for rule in ("truncation", "starving"):
        DEFECTS[rule].written(runs, rule)
    DEFECTS["learning_rate_high"].written(runs, "broken")
    Plot(steps=12).written(runs, "well")
    Plot({HOSTILE.replace("/", "-"): DEFECTS["truncation"].plays["words"]}).written(runs, "hostile")
    Told(runs, "empty").let_go()
    return runs


@pytest.fixture(scope="module")
def address(folder):
    with served(folder) as here:
        yield here


def test_an_advisory_leads_to_the_rollouts_that_show_it_and_to_the_key(page, address):  # noqa: F811
    _open(page, address, "#/run/truncation/advice", ".advisory")
    card = page.get_by_role("article", name="Replies of words are cut off")
    _expect(card).to_contain_text("How sure")
    _expect(card.get_by_role("row", name="sampling.max_tokens")).to_contain_text("--sampling.max_tokens 512")
    _expect(card.locator(".chart")).to_have_count(2)
    assert "share of rollouts" in card.locator(".chart .unit").all_inner_texts()
    link = card.get_by_role("link").first
    assert link.get_attribute("href").startswith("#/run/truncation/rollouts?id=")
    link.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/rollouts?id=*")


def test_the_overview_begins_with_the_first_cause_and_its_fix(page, address):  # noqa: F811
    _open(page, address, "#/run/broken/overview", ".first-cause")
    cause = page.locator(".notice").first
    _expect(cause).to_contain_text("The learning rate is too high: the policy broke")
    _expect(cause).to_contain_text("Fix: Set trainer.optimizer.lr to")
    cause.get_by_role("link", name="Advice").click()
    page.wait_for_selector(".advisory")
    _open(page, address, "#/run/truncation/overview", ".first-cause")
    _expect(page.locator(".notice").first).to_contain_text("Fix: set sampling.max_tokens = 512")
    _open(page, address, "#/run/starving/overview", ".first-cause")
    _expect(page.locator(".head .pill.health")).to_have_text("see advice")
    _expect(page.locator(".trail .pill.finished")).to_have_count(0)
    _open(page, address, "#/run/well/overview", ".chart canvas")
    _expect(page.locator("main h1")).to_have_text("well")
    _expect(page.locator(".first-cause")).to_have_count(0)


def test_the_tab_counts_them_wherever_one_is(page, address):  # noqa: F811
    _open(page, address, "#/run/starving/config", ".tabs .badge")
    assert page.locator(".tabs a", has_text="Advice").inner_text() == "Advice1"
    with page.expect_response("**/api/advice?run=well"):
        page.goto(f"{address}/#/run/well/config")
    _expect(page.locator(".trail .here")).to_have_text("well")
    _expect(page.locator(".tabs .badge")).to_have_count(0)


@pytest.mark.parametrize(
    ("run", "theme"),
    [("truncation", "light"), ("starving", "dark"), ("well", "light"), ("hostile", "dark"), ("empty", "light")],
)
def test_it_opens_without_a_complaint_for_every_run(page, address, run, theme):  # noqa: F811
    page.emulate_media(color_scheme=theme)
    page.set_viewport_size({"width": 700, "height": 900})
    _open(page, address, f"#/run/{run}/advice", ".advice table.list")
    assert page.locator("main h1").inner_text() == "Advice"
    assert page.get_by_role("region", name="All that was looked for").get_by_role("row").count() == len(RULES) + 1
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.locator("main img").count() == 0
    found = {"well": "Nothing to say about the last 12 steps.", "empty": "No step has trained yet."}
    if run in found:
        _expect(page.locator(".empty")).to_contain_text(found[run])


def test_a_finished_run_whose_reward_fell_is_not_green_and_its_advice_names_the_value(page, address):  # noqa: F811
    _open(page, address, "#/", "table.runs .pill.health")
    row = page.get_by_role("row", name="broken")
    _expect(row.locator(".pill.health")).to_have_text("collapsed")
    assert row.locator(".pill").first.inner_text() == "finished"
    assert row.locator(".pill.finished").count() == 0
    _open(page, address, "#/run/broken", ".notice.bad")
    _expect(page.locator(".notice.bad").first).to_contain_text("The reward of words fell")
    _open(page, address, "#/run/broken/advice", ".advisory")
    card = page.get_by_role("article").first
    _expect(card).to_contain_text("The learning rate is too high")
    _expect(card).to_contain_text("limit 0.3")


def test_a_rule_that_found_nothing_shows_its_value_or_why_it_has_none(page, address):  # noqa: F811
    _open(page, address, "#/run/well/advice", ".advice table.list")
    table = page.get_by_role("region", name="All that was looked for")
    _expect(table.get_by_role("row", name="Are replies cut off at the limit?")).to_contain_text("0.02")
    _expect(table.get_by_role("row", name="Has every environment its share")).to_contain_text("one environment alone")
    assert "–" not in table.locator("tbody td:nth-child(2)").all_inner_texts()
