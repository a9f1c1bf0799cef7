"""Pages on a phone and on a small laptop, in a real browser. Skipped where `test_ui_browser.py` is."""

import pytest
import test_ui_browser as ui
import test_ui_rollouts_browser as rollouts

from recorded_runs import Told
from token_run import tokened

pytestmark = ui.pytestmark
folder, address, browser, tab, page = rollouts.folder, rollouts.address, ui.browser, ui.tab, ui.page
expect = ui.playwright.expect
PHONE, LAPTOP = {"width": 390, "height": 844}, {"width": 1300, "height": 900}
INSIDE = """(one) => { const box = one.getBoundingClientRect();
  return box.left >= 0 && box.right <= document.documentElement.clientWidth; }"""


@pytest.fixture
def phone(page):
    page.set_viewport_size(PHONE)
    return page


def test_runs_are_cards_whose_values_say_what_they_are(phone, address):
    phone.goto(f"{address}/#/")
    card = phone.locator("tr[data-key=talk]")
    expect(card).to_be_visible()
    cells = card.locator("td")
    assert cells.evaluate_all(f"all => all.map({INSIDE})") == [True] * cells.count()
    headings = cells.evaluate_all("all => all.map((one) => getComputedStyle(one, '::before').content)")
    assert [text for text in headings if text != "none"] == [
        f'"{name} "' for name in ("State", "Health", "Step", "Reward", "Progress", "Held-out", "Last update")
    ]
    phone.get_by_role("button", name="Reward").click()
    expect(phone.locator("th[aria-sort=descending]")).to_have_text("Reward ↓")
    card.get_by_role("link", name="talk").click()
    phone.wait_for_selector(".vitals")


def test_the_name_of_the_run_is_shown_whole_above_its_pages(phone, folder, address):
    if not (folder / "reverse-seven").exists():
        Told(folder, "reverse-seven").step(3).end()
    phone.goto(f"{address}/#/run/reverse-seven/overview")
    name = phone.locator("#trail .here")
    expect(name).to_have_text("reverse-seven")
    expect(phone.locator("#trail .pill")).to_have_text("finished")
    assert name.evaluate("(one) => one.scrollWidth <= one.clientWidth")


def test_rollouts_are_cards_and_come_before_the_filters(phone, address):
    phone.goto(f"{address}/#/run/talk/rollouts")
    first = phone.locator(rollouts.ROWS).first
    expect(first).to_be_in_viewport()
    assert first.bounding_box()["y"] < PHONE["height"] / 2
    expect(phone.get_by_label("Reward from")).to_be_hidden()
    for heading in ("Prompt", "Expected", "Reply", "Reward"):
        expect(first.locator(f"td[data-heading={heading}]")).to_be_visible()
    phone.get_by_role("button", name="Filters", exact=True).click()
    phone.get_by_label("Reward from").fill("0.8")
    expect(phone.get_by_role("status").filter(has_text="of 86")).to_be_visible()


def test_the_conversation_of_a_rollout_comes_before_its_details(phone, address):
    phone.goto(f"{address}/#/run/talk/rollouts?id=80")
    talk, details = phone.locator(".talk").first, phone.get_by_role("complementary")
    expect(talk).to_be_visible()
    assert talk.bounding_box()["y"] < details.bounding_box()["y"]
    mean = details.locator("dd", has_text="2 rollouts")
    lines = mean.evaluate("(one) => one.getBoundingClientRect().height / parseFloat(getComputedStyle(one).lineHeight)")
    assert round(lines) == 1, "a fact is one line, and no word is broken"
    expect(phone.locator(".head", has_text="reward 0")).to_be_visible()


TABLES = (
    "diff?a=talk&b=rate",
    "compare?run=talk&run=rate",
    "run/rate/advice",
    "run/rate/tickets",
    "run/rate/config",
    "run/talk/rollouts?id=80&view=group",
)


@pytest.mark.parametrize("place", TABLES)
def test_rows_of_every_other_table_are_cards_too_and_no_number_is_broken(phone, folder, address, place):
    if not (folder / "rate").exists():
        tokened(folder, "rate", **{"trainer.optimizer.lr": 0.1}).end()
    phone.goto(f"{address}/#/{place}")
    table = phone.locator("table.list:visible").last
    expect(table).to_be_visible()
    assert table.locator("tbody tr").first.evaluate("(one) => getComputedStyle(one).display") == "flex"
    assert table.locator("tbody :is(td, th)").evaluate_all(f"all => all.every({INSIDE})")
    assert not phone.evaluate(ui.SIDEWAYS)
    named = "all => all.every((one) => getComputedStyle(one, '::before').content.length > 3)"
    assert table.locator("tbody td:not(:empty)").evaluate_all(named)
    numbers = table.locator("td.right").evaluate_all("""all => all.map((one) => {
      const range = document.createRange();
      range.selectNodeContents(one);
      return new Set([...range.getClientRects()].map(({ top }) => Math.round(top))).size;
    })""")
    assert set(numbers) <= {1}


def test_tags_are_shown_whole_on_a_small_laptop(page, folder, address):
    name = "a-run-whose-name-is-longer-than-most-are"
    Told(folder, name).step(12).end("failed", "the loss is not finite: lower trainer.optimizer.lr")
    page.set_viewport_size(LAPTOP)
    page.goto(f"{address}/#/")
    tags = page.locator(f"tr[data-key={name}] .tag")
    expect(tags).to_have_text(["reverse-text", "grpo", "quickstart"])
    assert tags.evaluate_all(f"all => all.map({INSIDE})") == [True] * 3
    assert page.locator(".scroll").evaluate("(one) => one.scrollWidth <= one.clientWidth")


def test_no_two_of_twenty_parts_of_a_stack_look_alike(page, address):
    page.goto(f"{address}/#/")
    page.wait_for_selector(ui.RUNS)
    found = page.evaluate("""async () => {
      const { distinct, drawBars, swatch } = await import('/static/js/chart/draw.js');
      const series = distinct(Array.from({length: 20}, (_, at) => ({ label: String(at), colour: at })));
      const canvas = Object.assign(document.createElement('canvas'), { width: 40, height: 800 });
      const context = canvas.getContext('2d', { willReadFrequently: true });
      const bars = [{ middle: 20, parts: series.map(() => 1) }];
      const area = { left: 0, top: 0, width: 40, height: 800 };
      drawBars(context, { area, bars, toX: (x) => x, toY: (y) => 800 - 40 * y }, series);
      const drawn = series.map((_, at) => context.getImageData(8, 760 - 40 * at, 24, 40).data.join());
      const signs = series.map((one) => { const sign = swatch(one, true); document.body.append(sign);
        const { backgroundColor, backgroundImage, opacity } = getComputedStyle(sign);
        sign.remove();
        return backgroundColor + backgroundImage + opacity; });
      return [new Set(drawn).size, new Set(signs).size];
    }""")
    assert found == [20, 20]
