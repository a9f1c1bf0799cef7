"""The replay and diff pages in a real browser, on a real run."""

import json
import shutil

import pytest
from test_ui_browser import SIDEWAYS, _expect, _open, browser, page, pytestmark, tab  # noqa: F401 - fixtures, and what skips

from paceline.config import load
from paceline.observe.web.replay import ReplayRunner, result_key
from paceline.observe.web.replay_result import ReplayResult
from recorded_runs import Told, served
from replayable_run import replayable

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
TIGHT = {"trainer.loss.type": "ppo", "trainer.loss.clip_low": 0, "trainer.loss.clip_high": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The run, one of which a loss and the words of a token differ, and one that kept no samples."""
    run = replayable(tmp_path_factory)
    runs = tmp_path_factory.mktemp("runs")
    shutil.copytree(run, runs / "kept")
    shutil.copytree(run, runs / "other", ignore=shutil.ignore_patterns("checkpoints", "batches", "export"))
    file = runs / "other" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[-1]["loss/rl"] += 1e-6
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    Told(runs, "bare").step(3).end()
    return runs


@pytest.fixture(scope="module", autouse=True)
def address(folder):
    """A server that remembers two results of step 3, and of step 2 one with a token that reads like markup. It comes
    before the browser, whose driver has an event loop on this thread: training needs its own."""
    from paceline.commands.replay import as_json, replay

    desk, run = ReplayRunner(), folder / "kept"
    for changes in ({}, TIGHT):
        config = load(run / "config.toml", [f"--{key}={value}" for key, value in changes.items()]).config
        told = json.loads(as_json(run, replay(run, 3, config), config))
        desk.results.put(run.resolve(), result_key(3, changes), ReplayResult(json.dumps(told).encode(), 3, changes))
    told["samples"][0]["text"][0] = HOSTILE
    desk.results.put(run.resolve(), result_key(2, {}), ReplayResult(json.dumps(told).encode(), 2, {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.observe.web.replay.ReplayRunner", lambda: desk)
        with served(folder) as here:
            yield here
        desk.close()


def test_the_pages_open_without_a_complaint_and_never_scroll_sideways(page, address):  # noqa: F811
    for place, wanted in (
        ("#/run/kept/replay?step=3&set=" + json.dumps(TIGHT), "th:has-text('with the change')"),
        ("#/run/bare/replay", ".empty"),
        ("#/diff?a=kept&b=other&exact=1", ".difference-side"),
    ):
        _open(page, address, place, wanted)
        for theme, width in (("dark", 700), ("light", 1400)):
            page.emulate_media(color_scheme=theme)
            page.set_viewport_size({"width": width, "height": 900})
            assert page.locator("main h1").count() == 1
            assert not page.evaluate(SIDEWAYS), place


def test_a_step_is_replayed_at_a_click_and_can_be_cancelled(page, address):  # noqa: F811
    _open(page, address, "#/run/kept/replay?step=2", "form")
    _expect(page.locator("#replay-weights")).to_contain_text("untrained model stands in")
    page.get_by_role("button", name="Replay", exact=True).click()
    page.get_by_role("button", name="Cancel").click()
    _expect(page.locator(".notice")).to_contain_text("Cancelled")
    page.get_by_label("Step").fill("3")
    _expect(page.locator("#replay-weights")).to_contain_text("Its own weights are kept")
    page.get_by_role("button", name="Replay", exact=True).click()
    page.locator("table.losses").wait_for(timeout=240_000)
    row = page.locator("table.losses tr", has=page.get_by_role("rowheader", name="loss", exact=True))
    recorded, replayed = row.locator("td").all_inner_texts()[:2]
    assert recorded == replayed
    assert "step=3" in page.url


def test_samples_unfold_to_tokens_that_keys_walk_through(page, address):  # noqa: F811
    _open(page, address, "#/run/kept/replay?step=3", "details.sample")
    page.locator("details.sample summary").first.focus()
    page.keyboard.press("Enter")
    chosen = page.locator("details.sample .bit[tabindex='0']")
    chosen.focus()
    page.keyboard.press("Home")
    first = page.locator(".bit-card").inner_text()
    page.keyboard.press("ArrowRight")
    _expect(page.locator(".bit-card")).not_to_have_text(first)
    assert "share of loss/rl" in page.locator(".bit-card").inner_text()
    assert (
        page.locator("details.sample button.bit").count() == page.locator("details.sample .bit:not(.bit-dim)").count()
    )
    page.locator(".weighty tbody button").nth(5).click()
    page.wait_for_selector("button.bit:focus")
    assert "tokens?id=" in page.locator(".weighty a").first.get_attribute("href")


def test_the_words_of_a_token_never_become_markup(page, address):  # noqa: F811
    _open(page, address, "#/run/kept/replay?step=2&set=nonsense", "details.sample")
    page.evaluate("document.querySelectorAll('details.sample').forEach((one) => (one.open = true))")
    _expect(page.locator(".bit", has_text="<img")).to_have_count(1)
    assert page.locator("main img").count() == 0
    assert page.title() != "owned"


def test_other_settings_stand_beside_what_was_and_their_tokens_name_the_rule(page, address):  # noqa: F811
    _open(page, address, "#/run/kept/replay?step=3&set=" + json.dumps(TIGHT), "th:has-text('with the change')")
    form = page.locator("form.loss-settings")
    assert form.get_by_label("loss.type").input_value() == "ppo"
    _expect(form.locator(".field.changed .name")).to_have_text(["loss.type", "loss.clip_low", "loss.clip_high"])
    assert page.locator(".weighty .rules", has_text="clip_").count() > 0
    page.get_by_role("button", name="kl", exact=True).click()
    _expect(page.get_by_role("button", name="kl", exact=True)).to_have_attribute("aria-pressed", "true")
    form.get_by_label("loss.clip_low").fill("")
    assert form.get_by_role("button", name="Replay with these settings").is_disabled()
    form.get_by_role("button", name="As the run had them").click()
    _expect(form.locator(".field.changed")).to_have_count(0)
    assert form.get_by_label("loss.type").input_value() == "dppo"


def test_the_first_difference_leads_to_its_place_and_rounding_can_be_looked_past(page, address):  # noqa: F811
    _open(page, address, "#/compare?run=kept&run=other", ".chart canvas")
    page.get_by_role("link", name="Differences").click()
    _expect(page.get_by_label("Curves").locator("h2")).to_contain_text("common steps")
    _expect(page.locator(".notice b").first).to_contain_text("bit differences are expected")
    assert page.locator(".difference-side").count() == 0
    page.get_by_label("Bit for bit").check()
    page.wait_for_selector(".difference-side")
    assert "exact=1" in page.url
    assert page.get_by_role("heading", level=2, name="First difference").inner_text().endswith("loss/rl")
    _expect(page.locator(".difference-chain .differs")).to_contain_text("the loss")
    page.get_by_role("button", name="Look past differences").click()
    _expect(page.locator("main .notice").last).to_contain_text("No difference")
    assert "tolerance=1e-5" in page.url
