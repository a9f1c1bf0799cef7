"""The page of rollouts in a real browser. Skipped where `test_ui_browser.py` is."""

import json
import re
import time
from pathlib import Path

import pytest
import test_ui_browser as ui

from conversations import TOOLS, Talking, asked, png, rollout, turn
from paceline.observe.analysis.payoff import Payoff
from recorded_runs import Told, served

pytestmark = ui.pytestmark
browser, tab, page = ui.browser, ui.tab, ui.page
expect = ui.playwright.expect
LONG = "A gradient is a slow change. "
PICTURES = [png(), "https://example.org/cat.png", "data:image/svg+xml;base64,PHN2Zy8+"]


def _pictures() -> list[dict]:
    content = [{"type": "text", "text": f"What is this? {ui.HOSTILE}"}]
    content += [{"type": "image_url", "image_url": {"url": source}} for source in PICTURES]
    return [{"role": "system", "content": "Be careful. " * 90}, {"role": "user", "content": content}]


def _looked_up() -> tuple[dict, list[dict]]:
    call = {"id": "call_1", "function": {"name": "look_up", "arguments": '{"word": "gradient"}'}}
    said = {"role": "assistant", "content": "I look it up.", "tool_calls": [call]}
    return said, [*_pictures(), said, {"role": "tool", "tool_call_id": "call_1", "content": LONG * 200}]


def _told(runs: Path) -> None:
    """Eighty plain rollouts, then one group with tools and pictures, one that broke, and one game."""
    Told(runs, "talk").step(5).end()
    said, onward = _looked_up()
    told = Talking(runs / "talk")
    for step in range(1, 11):
        plain = [rollout(step, n, [turn(asked(f"word {n}"), f"reply {step} {n}", step)], n / 8) for n in range(8)]
        told.played(step, "trained" if step % 2 else "dropped:stale", *plain)
    tries = [
        rollout(
            50,
            n,
            [
                turn(_pictures(), said["content"], 3, said, tools=TOOLS, seconds=0.5, started=0.25),
                turn(onward, text, 4, seconds=2.0, started=1.25, queued=0.5),
            ],
            n / 2,
            metrics={"right": n / 2, "words": 3.0, "tools": 1.0, "asked": 2.0, "judge/kind": 0.25},
            target="a red square",
            seconds=3.5,
            spans=[("sandbox", 3.25, 0.25)],
        )
        for n, text in enumerate(["red to green", "red to blue"])
    ]
    grades = [
        {"judge": "task", "score": 1.0, "value": 1.0},
        {"judge": "kind", "score": 0.25, "value": 2.0, "model": "m"},
    ]
    extra = {"seconds": 0.2, "text": "", "attempts": 1, "cached": False, "weight": 0.5, "model": ""}
    judged = rollout(70, 0, [turn(asked("?"), "so")], 0.625, verdicts=[extra | grade for grade in grades])
    told.played(11, "trained", *tries, rollout(51, 0, [], None, error=f"too slow {ui.HOSTILE}"))
    first, second = asked("you begin"), asked("seller: nine gold")
    game = {"kind": "bargain", "env": "market"}
    seller = rollout(60, 0, [turn(first, "nine gold")], 0.3, actor="seller", **game)
    buyer = rollout(60, 0, [turn(second, "four gold")], 0.7, actor="buyer", **game)
    told.played(12, "trained", buyer, seller, judged).close()


def _league(run: Path) -> None:
    payoff = Payoff()
    for points in (1.0, 0.5, 1.0):
        payoff.add("v4", "v0", points)
    at = run / "checkpoints" / "step-000004"
    at.mkdir(parents=True)
    state = {"step": 4, "leagues": ["duel"], "environments": {"duel": {"league": {"payoff": payoff.state()}}}}
    (at / "state.json").write_text(json.dumps(state))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    _told(runs)
    rated = Told(runs, "rated").step(2)
    rated.recorder.step(3, {"league/duel/rating": 12.0})
    _league(rated.end().path)
    return runs


@pytest.fixture(scope="module")
def address(folder: Path):
    with served(folder) as here:
        yield here


def _open(page, address: str, place: str, wanted: str) -> None:
    page.goto(f"{address}/#/run/{place}")
    page.wait_for_selector(wanted)


ROWS = "table.rollouts tbody tr"
PLACES = {
    "talk/rollouts": ROWS,
    "talk/rollouts?id=80": ".message.tool",
    "talk/rollouts?id=80&view=group": ".columns .try",
    "talk/rollouts?id=83&view=episode": ".line li",
    "talk/rollouts?id=82": ".notice.bad",
    "rated/rollouts": ".empty",
    "rated/rollouts?view=league": ".payoff td.won",
}


def test_every_view_opens_without_a_complaint_wide_and_narrow(page, address):
    for place, wanted in PLACES.items():
        _open(page, address, place, wanted)
        for theme, width in (("dark", 700), ("light", 1400)):
            page.emulate_media(color_scheme=theme)
            page.set_viewport_size({"width": width, "height": 900})
            assert page.locator("main h1").count() == 1
            assert not page.evaluate(ui.SIDEWAYS), f"{place} scrolls sideways"
        unnamed = """[...document.querySelectorAll('main button, main input, main select, main a')].filter((one) =>
          one.offsetParent && !(one.ariaLabel || one.textContent.trim() || one.closest('label'))).length"""
        assert page.evaluate(unnamed) == 0


def test_a_line_of_the_list_says_what_was_asked_expected_and_measured_and_a_click_opens_it(page, address):
    _open(page, address, "talk/rollouts?ticket=50&sort=-reward", ROWS)
    cells = page.locator(f"{ROWS}:first-child td").all_inner_texts()
    headings = [text.strip(" ↓") for text in page.locator("table.rollouts th").all_inner_texts()]
    line = dict(zip(headings, cells, strict=True))
    assert line["Prompt"].startswith("What is this?")
    assert (line["Expected"], line["Reply"]) == ("a red square", "red to blue")
    assert line["Metrics"].split("\n") == ["judge/kind 0.250", "right 0.500", "and 3 more"]
    _open(page, address, "talk/rollouts?ticket=50", ROWS)
    page.locator(f"{ROWS} td.asked").first.click()
    expect(page.locator("h1")).to_have_text("Rollout 81")
    outcome = page.get_by_role("region", name="Outcome")
    expect(outcome).to_contain_text(re.compile("Expected answer\\s*a red square"))
    expect(outcome).to_contain_text(re.compile("Mean of its group\\s*0.250, 2 rollouts"))
    expect(page.get_by_role("region", name="Why this reward")).to_contain_text(re.compile("right\\s*0.500"))
    took = page.get_by_role("region", name="Durations")
    expect(took).to_contain_text(
        re.compile(
            "Episode\\s*3.50 s\\s*Sampling\\s*2.50 s in 2 turns\\s*Environment\\s*1.00 s\\s*"
            "Queue\\s*0.50 s in 1 call\\s*Tools\\s*0.50 s in 1 call\\s*Sandbox\\s*0.25 s in 1 call"
        )
    )
    expect(page.locator(".message.assistant header").last).to_contain_text("2.00 s")
    lane = {name: took.get_by_role("list", name=name) for name in ("Engine", "Queue", "Tools", "Sandbox")}
    assert [one.inner_text() for one in lane.values()][1:] == [
        "queue 1: from 1.25 s, 0.50 s long",
        "tools 1: from 0.75 s, 0.50 s long",
        "sandbox 1: from 3.25 s, 0.25 s long",
    ]
    calls = lane["Engine"].get_by_role("listitem")
    assert calls.all_inner_texts() == ["turn 1: from 0.25 s, 0.50 s long", "turn 2: from 1.75 s, 1.50 s long"]
    bars = [one.bounding_box() for one in calls.all()]
    (first, second), gap = bars, bars[1]["x"] - bars[0]["x"] - bars[0]["width"]
    assert second["width"] / first["width"] == pytest.approx(3, rel=0.02)
    assert gap / first["width"] == pytest.approx(2, rel=0.02), "the tool and the queue took a second between them"
    tools = lane["Tools"].get_by_role("listitem").bounding_box()
    assert tools["x"] == pytest.approx(first["x"] + first["width"], abs=1)


def test_the_grades_of_judges_add_up_to_the_reward_on_the_page(page, address):
    _open(page, address, "talk/rollouts?ticket=70", ROWS)
    page.locator(ROWS).click()
    parts = page.get_by_role("region", name="Parts of the reward")
    expect(parts).to_contain_text("0.500 × 1 + 0.500 × 0.250 = 0.625")


def test_what_is_not_recorded_is_no_fact(page, address):
    """Neither target nor durations, as in records of earlier versions."""
    _open(page, address, "talk/rollouts?id=0", ".facts")
    assert page.locator(".facts dt").filter(has_text=re.compile("Expected|Episode|Sampling")).count() == 0


def test_a_filter_is_in_the_address_and_comes_back_with_it(page, address):
    _open(page, address, "talk/rollouts", ROWS)
    expect(page.locator(ROWS)).to_have_count(50)
    page.keyboard.press("/")
    page.keyboard.type("REPLY 2")
    expect(page.locator(ROWS)).to_have_count(8)
    assert page.locator(f"{ROWS} mark").all_inner_texts() == ["reply 2"] * 8
    page.get_by_label("State").select_option("dropped:")
    page.get_by_label("Reward from").fill("0.5")
    expect(page.locator(ROWS)).to_have_count(4)
    page.get_by_role("button", name="Reward", exact=True).click()
    expect(page.locator("th[aria-sort=descending]")).to_have_text("Reward ↓")
    rewards = page.locator(f"{ROWS} td:nth-child(5)")
    expect(rewards).to_have_text(["0.875", "0.750", "0.625", "0.500"])
    page.reload()
    expect(rewards).to_have_text(["0.875", "0.750", "0.625", "0.500"])
    assert page.get_by_label("Reward from").input_value() == "0.5"
    expect(page.get_by_role("status").filter(has_text="4 of")).to_be_visible()
    page.get_by_role("button", name="Clear filters").click()
    expect(page.locator(ROWS)).to_have_count(50)
    page.get_by_role("button", name="Next").click()
    expect(page.locator(".pager")).to_contain_text("page 2 of 2")
    assert "page=2" in page.url


def test_a_filter_that_is_set_before_the_list_has_come_is_what_comes(page, address):
    held: list = []
    page.route("**/api/rollouts?*", lambda route: route.continue_() if held else held.append(route))
    page.goto(f"{address}/#/run/talk/rollouts")
    page.locator("[data-search]").fill("REPLY 2")
    expect(page.locator(ROWS)).to_have_count(8)
    page.unroute_all()


def test_keys_open_a_rollout_and_walk_through_the_same_list(page, address):
    _open(page, address, "talk/rollouts?state=dropped%3A&sort=-reward", ROWS)
    listed = page.locator(f"{ROWS} td:first-child").all_inner_texts()
    page.locator(ROWS).first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text(f"Rollout {listed[1]}")
    page.keyboard.press("j")
    expect(page.locator("h1")).to_have_text(f"Rollout {listed[2]}")
    page.keyboard.press("k")
    expect(page.locator("h1")).to_have_text(f"Rollout {listed[1]}")
    page.get_by_role("link", name="2 of 40 in the list").click()
    page.wait_for_selector(ROWS)
    assert "sort=-reward" in page.url


def test_hostile_words_stay_words_and_only_a_picture_in_the_message_is_drawn(page, address):
    for place, wanted in (("talk/rollouts?id=80", ".message.user"), ("talk/rollouts?id=82", ".notice.bad pre")):
        _open(page, address, place, wanted)
        assert ui.HOSTILE in page.locator(wanted).inner_text()
        assert page.title() != "owned"
    _open(page, address, "talk/rollouts?id=80", ".message img")
    ui.wait_until(page, "document.querySelector('.message img').naturalWidth === 24")
    assert page.locator("main img").count() == 1
    named = page.locator(".unshown").all_inner_texts()
    assert [text.partition(",")[0] for text in named] == [
        "an image at https://example.org/cat.png",
        "an image of type image/svg+xml",
    ]
    assert page.locator("main script").count() == 0


def test_a_conversation_shows_tools_and_folds_what_is_long(page, address):
    _open(page, address, "talk/rollouts?id=80", ".message.tool")
    assert not page.get_by_text("Be careful.").is_visible()
    page.get_by_text("Show 1.1k characters").click()
    expect(page.get_by_text("Be careful.")).to_be_visible()
    call = page.locator(".message.assistant").first
    expect(call.locator(".call")).to_have_text(re.compile(r'Calls look_up call_1{\s*"word": "gradient"\s*}'))
    result = page.locator(".message.tool")
    assert len(result.inner_text()) < 2000
    result.get_by_role("button", name="Show all 5,800 characters").click()
    assert LONG * 199 in result.inner_text()
    for name, place in (("Tokens", "tokens?id=80"), ("Ticket 50", "tickets?ticket=50")):
        link = page.get_by_role("navigation", name="Views of this rollout").get_by_role("link", name=name)
        assert link.get_attribute("href") == f"#/run/talk/{place}"


def test_a_group_marks_where_a_reply_leaves_the_other(page, address):
    _open(page, address, "talk/rollouts?id=80", ".views")
    page.get_by_role("link", name="Group of 2").click()
    page.wait_for_selector(".columns")
    assert page.locator(".tries tbody tr").count() == 2
    assert page.locator("mark.parts").all_inner_texts() == ["blue"]
    expect(page.locator(".try").nth(1).locator(".piece").last).to_contain_text("red to blue")


def test_a_group_opened_from_its_one_different_try_shows_that_difference(page, folder, address):
    Told(folder, "same").step(1).end()
    told = Talking(folder / "same")
    texts = ["the answer is 4"] * 3 + ["the answer is 5"] + ["the answer is 4"] * 4
    told.played(
        1, "trained", *[rollout(1, n, [turn(asked("2 + 2"), text)], float(n != 3)) for n, text in enumerate(texts)]
    )
    told.close()
    _open(page, address, "same/rollouts?id=3&view=group", ".columns .try")
    cards = page.locator(".try")
    expect(cards).to_have_count(2)
    expect(cards.first.locator("header")).to_contain_text("7 identical tries")
    expect(cards.first.locator("header")).to_contain_text("most frequent")
    expect(cards.first).to_contain_text("the answer is 4")
    expect(cards.nth(1)).to_contain_text("Try 3")
    expect(cards.nth(1)).to_have_class("try here")
    assert page.locator("mark.parts").all_inner_texts() == ["5"]
    expect(page.locator("mark.parts")).to_be_in_viewport()
    cards.first.get_by_role("link", name="Try 6").click()
    expect(page.locator("h1")).to_have_text("Rollout 6")


def test_a_board_of_nine_letters_is_drawn_in_rows_and_other_words_are_not(page, folder, address):
    Told(folder, "boards").step(1).end()
    told = Talking(folder / "boards")
    texts = ("axcdofghi", "abcdefghi", "axcdofghj", "ooxxooxxo.", "carefully")
    told.played(1, "trained", *[rollout(n, 0, [turn(asked(text), "c")]) for n, text in enumerate(texts)]).close()
    for number, text in enumerate(texts):
        _open(page, address, f"boards/rollouts?id={number}", ".message.user")
        expect(page.locator(".message.user .words")).to_have_text(text)
        assert page.locator(".board").count() == (number < 2)
        if number == 0:
            board = page.get_by_role("img", name="Board, row by row: axc, dof, ghi")
            assert board.bounding_box()["height"] > 3 * board.locator("span").first.bounding_box()["height"]


MARKED = """# Steps

1. **first**, `x = 1`

```python
def double(x):
    return 2 * x
```

| a | b |
|---|---|
| 1 | 2 |

So $x_1 + y_2$ holds, see [a page](https://example.org/a).
[click](javascript:document.title='owned') <script>document.title="owned"</script>
<a href="javascript:document.title='owned'" onclick="document.title='owned'">words</a>
<img src=x onerror="document.title='owned'">
![picture](https://example.org/cat.png)"""
BOARD = " 0 | X | 2 \n---+---+---\n 3 | O | 5 \n---+---+---\n 6 | 7 | 8 "


def write_marked(runs: Path) -> None:
    """Replies in Markdown, a long one, a board, and JSON."""
    Told(runs, "marked").step(1).end()
    told = Talking(runs / "marked")
    replies = [MARKED, "- point\n" * 400, '{"move": [1, 2]}', "no marks at all"]
    asks = asked(f"Board:\n{BOARD}\nYour move.")
    told.played(1, "trained", *[rollout(1, n, [turn(asks, text)], 1.0) for n, text in enumerate(replies)]).close()


@pytest.fixture(scope="module")
def marked(folder):
    write_marked(folder)


@pytest.mark.usefixtures("marked")
def test_markdown_code_and_boards_are_drawn_and_nothing_in_them_runs(page, address):
    _open(page, address, "marked/rollouts?id=0", ".message.assistant .markup")
    reply = page.locator(".message.assistant .markup")
    expect(reply.locator(".heading")).to_have_text("Steps")
    expect(reply.locator("ol strong")).to_have_text("first")
    expect(reply.locator("pre .code-keyword").first).to_have_text("def")
    expect(reply.locator("td")).to_have_text(["1", "2"])
    formula = reply.get_by_role("img", name="x_1 + y_2")
    size = formula.bounding_box()
    assert size["width"] > 2 * size["height"] > 20
    inked = formula.locator("path").evaluate("(one) => [one.getBBox().width, getComputedStyle(one).fill]")
    assert inked[0] > 200
    assert inked[1] == reply.evaluate("(one) => getComputedStyle(one).color"), "light on dark, and dark on light"
    expect(page.locator(".message.user .grid td")).to_have_text(["0", "X", "2", "3", "O", "5", "6", "7", "8"])
    assert reply.locator("a").evaluate_all("all => all.map((one) => one.href)") == ["https://example.org/a"]
    assert page.locator("main script, main img").count() == 0
    page.get_by_text("click", exact=False).last.click()
    page.get_by_text("words", exact=False).last.click()
    assert page.title() != "owned"


@pytest.mark.usefixtures("marked")
def test_raw_text_is_a_click_away_and_in_the_address(page, address):
    _open(page, address, "marked/rollouts?id=0", ".message.assistant .markup")
    page.get_by_role("link", name="Raw text").click()
    expect(page.locator(".message.assistant .words")).to_have_text(MARKED)
    assert "shown=raw" in page.url
    page.reload()
    expect(page.locator(".message.assistant .words")).to_have_text(MARKED)
    assert page.locator(".markup").count() == 0
    page.keyboard.press("k")
    expect(page.locator("h1")).to_have_text("Rollout 1")
    assert "shown=raw" in page.url, "it stays on the way through the list"
    page.get_by_role("link", name="Rendered text").click()
    expect(page.locator(".message.assistant .markup li")).to_have_count(400)
    assert "shown=" not in page.url


@pytest.mark.usefixtures("marked")
def test_a_long_drawn_reply_is_folded_and_plain_words_have_no_other_view(page, address):
    _open(page, address, "marked/rollouts?id=1", ".message.assistant .markup.folded")
    reply = page.locator(".message.assistant")
    folded = reply.bounding_box()["height"]
    reply.get_by_role("button", name="Show all 3,200 characters").click()
    assert reply.bounding_box()["height"] > 2 * folded
    _open(page, address, "marked/rollouts?id=2", ".message.assistant .code-name")
    expect(page.locator(".message.assistant pre")).to_contain_text('"move"')
    _open(page, address, "marked/rollouts?id=3", "h1:has-text('Rollout 3')")
    page.get_by_role("link", name="Raw text").click()
    expect(page.locator(".message.user .words")).to_contain_text("---+---+---")
    _open(page, address, "talk/rollouts?id=0", "h1:has-text('Rollout 0')")
    expect(page.get_by_role("link", name="Raw text")).to_have_count(0)


def test_an_episode_shows_every_seat_in_its_colour_in_the_order_of_speaking(page, address):
    _open(page, address, "talk/rollouts?id=83&view=episode", ".line li")
    assert page.locator(".seat header a").all_inner_texts() == ["buyer", "seller"]
    assert page.locator(".line .message.assistant .words").all_inner_texts() == ["nine gold", "four gold"]
    colours = page.locator(".line li").evaluate_all(
        "all => all.map((one) => getComputedStyle(one, '::before').backgroundColor)"
    )
    assert len(set(colours)) == 2


def test_the_league_has_a_link_where_there_is_one_and_numbers_in_its_heat_map(page, address):
    _open(page, address, "talk/rollouts", ROWS)
    assert not page.get_by_role("link", name="League").is_visible()
    _open(page, address, "rated/rollouts", ".empty")
    page.get_by_role("link", name="League").click()
    page.wait_for_selector(".payoff")
    assert page.locator(".payoff td.won").all_inner_texts() == ["0.83"]
    assert page.locator(".payoff td.lost").all_inner_texts() == ["0.17"]
    colour = "(one) => getComputedStyle(one).backgroundColor"
    assert page.locator(".payoff td.won").evaluate(colour) != page.locator(".payoff td.lost").evaluate(colour)


def test_new_rollouts_are_told_of_and_the_list_does_not_jump(page, folder, address):
    run = Told(folder, "living", began=time.time() - 10).step(1)
    told = Talking(folder / "living")
    told.played(1, "trained", rollout(1, 0, [turn(asked("a"), "the first")], 1.0))
    _open(page, address, "living/rollouts", ROWS)
    told.played(2, "trained", *[rollout(2, n, [turn(asked("b"), f"later {n}")], 1.0) for n in range(3)])
    news = page.get_by_role("button", name="3 new: show")
    expect(news).to_be_visible()
    assert page.locator(ROWS).count() == 1
    news.click()
    expect(page.locator(ROWS)).to_have_count(4)
    expect(news).to_be_hidden()
    told.close()
    run.let_go()


def test_a_rollout_that_is_not_there_says_so(browser, address):
    """Not with the silent page: the browser itself notes the 404."""
    opened = browser.new_page()
    _open(opened, address, "talk/rollouts?id=9999", ".notice")
    assert "there is no rollout 9999" in opened.locator(".notice").inner_text()
    opened.close()
