"""The token inspector and the tickets page in a real browser. Skipped where `test_ui_browser.py` is."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import test_ui_browser as ui

import recorded_runs
from paceline.data.sample import CLIPPED, TOKEN_SCORE, TokenScores, trained_mask
from paceline.observe.record import Query, open_run
from paceline.observe.web import build_app
from paceline.observe.web.replay import ReplayRunner
from paceline.observe.web.replay_result import ReplayResult
from recorded_runs import served
from token_run import FACE, HOSTILE, PROMPT, tokened

pytestmark = ui.pytestmark
browser, tab, page = ui.browser, ui.tab, ui.page
expect = ui.playwright.expect
LONG = 30_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    runs = tmp_path_factory.mktemp("runs")
    tokened(runs, length=LONG, began=time.time() - 100).end()
    tokened(runs, "numbers", **{"model.name": runs / "nowhere"}).let_go()
    tokened(runs, "scored", scores=_moved).end()
    living = tokened(runs, "living", began=time.time() - 10)
    yield runs
    living.let_go()


@pytest.fixture(scope="module")
def address(folder: Path):
    with served(folder) as here:
        yield here


def _index(folder: Path, ticket: int, member: int, run: str = "tokens") -> int:
    found = open_run(folder / run).rollouts.find(Query(ticket=ticket, domain="training", limit=None))
    return next(row.index for row in found.rows if row.member == member)


def _open(page, address: str, place: str, wanted: str) -> None:
    if page.url.startswith(address):
        ui.leave(page)
    ui._open(page, address, f"#/run/{place}", wanted)


def test_tokens_are_text_whatever_they_say_and_hide_nothing(page, folder, address):
    _open(page, address, f"tokens/tokens?id={_index(folder, 0, 0)}", ".token-chip")
    shown = page.locator(".token-strip .token-chip").all_inner_texts()
    assert HOSTILE in shown
    assert page.locator("main img").count() == 0
    assert page.title() != "owned"
    assert shown.count("↵") == 2
    assert {"F0 9F 98", "80", "␣", "⟨U+202E⟩"} <= set(shown)
    assert page.locator(".token-swap").all_inner_texts() == ["v0 → v1"]
    assert page.locator(".token-chip.given").count() == len(PROMPT) + 1, "the prompt, and the one in the legend"
    _open(page, address, "numbers/tokens?id=5", ".token-chip")
    assert page.locator("#token-6").inner_text() == "#5"
    assert "no tokenizer.json" in page.locator(".notice").all_inner_texts()[-1]


def test_keys_walk_through_tokens_and_the_card_explains_each(page, folder, address):
    index = _index(folder, 0, 2)
    _open(page, address, f"tokens/tokens?id={index}&at={len(PROMPT)}", ".token-card .token-line")
    card = page.get_by_role("complementary", name="The chosen token")
    expect(card).to_contain_text("= 0.75 − 0.5 = +0.25")
    strip = page.get_by_role("listbox", name="Tokens, 16 of them")
    chosen = strip.locator("[aria-selected=true]")
    page.keyboard.press("Home")
    expect(chosen).to_have_text("<|user|>")
    expect(card).to_contain_text("The policy did not sample it")
    page.keyboard.press("n")
    assert strip.get_attribute("aria-activedescendant") == f"token-{len(PROMPT)}"
    page.keyboard.press("v")
    expect(chosen).to_have_text("c")
    expect(card).to_contain_text("version 1")
    page.keyboard.press("Shift+N")
    expect(chosen).to_have_text("↵")
    page.keyboard.press("ArrowUp")
    assert int(chosen.get_attribute("data-at")) < len(PROMPT)
    page.keyboard.press("ArrowLeft")
    told = page.evaluate(f"fetch('/api/tokens?run=tokens&id={index}').then((answer) => answer.json())")
    order = sorted(range(16), key=lambda at: told["streams"]["logprobs"][at])
    for at in order[:3]:
        page.keyboard.press("p")
        assert chosen.get_attribute("data-at") == str(at), "the most surprising first"
    assert f"at={order[2]}" in page.url
    page.locator("#token-2").hover()
    expect(card).to_contain_text("token 2 of 16")
    page.locator("h1").hover()
    expect(card).to_contain_text(f"token {order[2]} of 16")


def test_a_chosen_stream_colours_the_tokens_and_has_its_scale(page, folder, address):
    _open(page, address, f"tokens/tokens?id={_index(folder, 2, 1)}&stream=parts", ".token-chip")
    tint = "(at) => getComputedStyle(document.getElementById(`token-${at}`)).backgroundColor"
    sampled, told_by_tool = len(PROMPT), len(PROMPT) + 4
    assert len({page.evaluate(tint, at) for at in (0, sampled, told_by_tool)}) == 3
    expect(page.locator(".token-legend .token-case")).to_have_text(["rl", "ce"])
    expect(page.locator(".token-main > .token-scale")).to_contain_text("trained by ce: 2 tokens")
    page.get_by_label("Colour tokens by").select_option("advantages")
    expect(page.get_by_role("img", name="Scale from −0.6667 to 0.6667")).to_be_visible()
    assert page.evaluate(tint, told_by_tool) == page.evaluate(tint, 0)
    assert page.get_by_role("option", name="ratio (not recorded)").is_disabled()


STREAMS = """async ([streams, values, ratios]) => {
  const { streams: of, scale } = await import("/static/js/tokens/streams.js");
  const told = { ids: values, trained: {}, rollout: { step: 1, domain: "training" }, streams: {
    loss_mask: values.map(() => 1), logprobs: values,
    teacher_logprobs: values.map((value, at) => value + ratios[at] - 1) } };
  const again = { ratio: ratios, rules: new Map(), share: ratios, entropy: values.map(() => 1e-6), logprob: values };
  return Object.fromEntries(of(told, again).filter(({ key }) => streams.includes(key)).map((one) => [one.key, {
    ends: one.ends,
    strength: one.values.map((value) => one.paint(value).t),
    tint: one.values.map((value) => one.paint(value).tint),
    text: [scale(one)].flat().map((part) => part.textContent).join(" ") }]));
}"""
RAMPS, DIVERGING = ["logprobs", "teacher_logprobs", "logprob"], ["ratio", "pull"]


def _streams(page, values: list[float], ratios: list[float]) -> dict:
    return page.evaluate(STREAMS, [[*RAMPS, *DIVERGING, "entropy"], values, ratios])


def test_a_log_probability_has_the_same_colour_in_every_rollout_and_the_legend_its_extremes(page, folder, address):
    _open(page, address, f"tokens/tokens?id={_index(folder, 0, 0)}", ".token-chip")
    surprised = _streams(page, [-7.86, -0.047, *[-0.01] * 300], [1.0] * 302)["logprobs"]
    certain = _streams(page, [-0.047, -0.02], [1.0] * 2)["logprobs"]
    assert surprised["ends"] == certain["ends"] == [0, -5]
    assert surprised["strength"][:2] == [1, certain["strength"][0]]
    assert certain["strength"][0] == pytest.approx(0.0094)
    assert surprised["text"] == "0−5 here from −7.86 to −0.01"
    assert {_streams(page, [-9.0, -1.0], [1.0] * 2)[name]["strength"][1] for name in RAMPS} == {0.2}


def test_ratios_that_are_equal_up_to_rounding_stay_pale(page, folder, address):
    _open(page, address, f"tokens/tokens?id={_index(folder, 0, 0)}", ".token-chip")
    rounded = _streams(page, [-1.0, -1.0], [1 + 1e-7, 1 - 1e-7])
    for name in DIVERGING:
        assert max(rounded[name]["strength"]) < 1e-6
    assert rounded["ratio"]["ends"] == pytest.approx([0.8, 1.25])
    assert max(rounded["entropy"]["strength"]) < 1e-5
    far = _streams(page, [-1.0, -1.0, -1.0], [2.0, 0.5, 1.0])["ratio"]
    assert far["ends"] == pytest.approx([0.5, 2.0])
    assert far["strength"] == pytest.approx([1, 1, 0])
    assert len(set(far["tint"][:2])) == 2
    assert _streams(page, [-1.0], [0.0])["ratio"]["strength"] == [1], "a ratio of 0 breaks no scale"


# Machado, Oliveira and Fernandes (2009), the whole deficiency: what is left of linear red, green and blue.
VISION = {
    "full": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
PAINTED = """(tints) => {
  const strip = document.querySelector(".token-strip");
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const pixel = (...colours) => {
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const ground = getComputedStyle(strip).backgroundColor;
  return { text: pixel(getComputedStyle(strip).color), ends: tints.map((tint) => {
    const chip = document.createElement("span");
    chip.className = "token-chip";
    chip.style.setProperty("--tint", tint);
    chip.style.setProperty("--t", "1");
    strip.append(chip);
    const colour = pixel(ground, getComputedStyle(chip).backgroundColor);
    chip.remove();
    return colour;
  }) };
}"""


def _linear(colour: list[int]) -> np.ndarray:
    share = np.array(colour) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def _luminance(colour: list[int]) -> float:
    return float(_linear(colour) @ [0.2126, 0.7152, 0.0722])


def test_up_and_down_can_be_told_apart_without_red_and_green_and_their_text_be_read(page, folder, address):
    _open(page, address, f"tokens/tokens?id={_index(folder, 0, 0)}&stream=advantages", ".token-chip")
    tints = _streams(page, [-1.0, -1.0], [2.0, 0.5])["ratio"]["tint"]
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        painted = page.evaluate(PAINTED, tints)
        for colour in painted["ends"]:
            low, high = sorted([_luminance(colour), _luminance(painted["text"])])
            assert (high + 0.05) / (low + 0.05) >= 4.5, f"text on {colour} in the {theme} theme"
        for name, left in VISION.items():
            up, down = (np.clip(np.array(left) @ _linear(colour), 0, 1) for colour in painted["ends"])
            assert np.abs(up - down).max() > 0.15, f"{theme}, {name}"


def test_the_stream_of_the_address_is_kept_on_every_way_from_the_page_and_back(page, folder, address):
    first, evaluated = _index(folder, 0, 1), 0
    _open(page, address, f"tokens/tokens?id={first}&stream=advantages", ".token-chip")
    choice = page.get_by_label("Colour tokens by")
    mate = page.locator(".token-mates a:not([aria-current])").first
    assert "stream=advantages" in mate.get_attribute("href")
    mate.click()
    expect(page.locator("h1")).not_to_have_text(f"Tokens of rollout {first}")
    expect(choice).to_have_value("advantages")
    page.get_by_role("link", name="Conversation").click()
    page.wait_for_selector(".views")
    assert "stream=advantages" in page.url
    page.get_by_role("link", name="Next").click()
    page.wait_for_url("**stream=advantages**")
    page.get_by_role("navigation", name="Views of this rollout").get_by_role("link", name="Tokens").click()
    expect(choice).to_have_value("advantages")
    page.get_by_label("Go to rollout").fill(str(evaluated))
    page.keyboard.press("Enter")
    expect(page.locator(".token-legend")).to_contain_text("Not known here: advantages")
    assert "stream=advantages" in page.url, "a rollout without it does not take it away"
    page.get_by_role("navigation", name="Pages of this run").get_by_role("link", name="Tokens").click()
    expect(choice).to_have_value("advantages")
    choice.select_option("versions")
    page.reload()
    expect(choice).to_have_value("versions")
    page.go_back()
    expect(page.locator("h1")).to_have_text(f"Tokens of rollout {evaluated}")
    assert "stream=advantages" in page.url


def test_thirty_thousand_tokens_are_laid_out_and_walked(page, folder, address):
    _open(page, address, f"tokens/tokens?id={_index(folder, 4, 1)}&at=25000", "#token-25000[aria-selected=true]")
    assert page.locator("#token-25000").is_visible()
    page.keyboard.press("End")
    expect(page.locator(f"#token-{LONG + len(PROMPT) - 1}")).to_be_in_viewport()
    expect(page.get_by_role("complementary", name="The chosen token")).to_contain_text("loss share at r = 1")
    expect(page.locator(".token-strip .token-chip")).to_have_count(LONG + len(PROMPT))


def test_what_did_not_train_says_so_before_anything_else(page, folder, address):
    _open(page, address, f"tokens/tokens?id={_index(folder, 1, 0)}", ".notice")
    assert "every advantage in the group is zero" in page.locator(".notice").inner_text()
    _open(page, address, f"tokens/tokens?id={_index(folder, 2, 3)}", ".notice")
    assert "the tool is gone" in page.locator(".notice").inner_text()


def _moved(batch) -> TokenScores:
    """Every second token 1.5 times as likely as when it was sampled; the first is clipped."""
    scores = {}
    for place, sample in enumerate(batch):
        at = np.flatnonzero(trained_mask(sample))
        scores[place] = np.zeros(len(at), TOKEN_SCORE)
        scores[place]["logprob"] = sample.logprobs[at] + np.where(np.arange(len(at)) % 2, 0.0, np.log(1.5))
        scores[place]["entropy"], scores[place]["flags"][0] = 0.75, CLIPPED
    return TokenScores.of(scores)


def test_ratio_entropy_and_clipping_are_there_without_a_replay(page, folder, address):
    place = f"scored/tokens?id={_index(folder, 0, 1, 'scored')}&stream=ratio&at={len(PROMPT)}"
    _open(page, address, place, ".token-card .token-line")
    choice = page.get_by_label("Colour tokens by")
    names = choice.locator("option").all_inner_texts()
    assert {"ratio", "entropy", "trainer's log probability", "clipped"} <= set(names)
    assert not any("not recorded" in name for name in names)
    expect(page.locator(".token-range")).to_have_text("here from 1 to 1.5")
    card = page.get_by_role("complementary", name="The chosen token")
    expect(card).to_contain_text(re.compile(r"ratio\s*1.5\s*= π / μ"))
    expect(card).to_contain_text("A bound of the loss held it back.")
    expect(card).to_contain_text(re.compile(r"entropy\s*0.75"))
    assert "at r = 1" not in card.inner_text()
    assert page.locator(".token-strip .token-chip.held").count() == 1
    expect(page.locator(".token-main")).to_contain_text("held back by a bound: 1 token")
    likely = card.locator(".alternatives li")
    assert [one.split() for one in likely.all_inner_texts()] == [
        ["the", "0.7788", "sampled"],
        ["F0", "9F", "98", "0.1738"],
    ]
    choice.select_option("entropy")
    expect(page.locator(".token-range")).to_have_text("here 0.75")


def test_a_replay_brings_the_ratio_and_the_rule_that_held_a_token_back(browser, folder, monkeypatch):
    run = open_run(folder / "tokens")
    samples = run.rollouts.batch(1)
    told = []
    for sample in samples:
        places = [int(at) for at in sample.loss_mask.nonzero()[0]]
        count = len(places)
        held = [{"token": 1, "component": "rl", "rule": "d 0.31 is above trainer.loss.high = 0.2"}]
        trained = {"places": places, "logprob": [-0.5] * count, "ratio": [1.25] * count, "advantage": [0.5] * count}
        trained |= {"entropy": [0.7] * count, "share": {"rl": [0.01] * count}, "held_back": held, "skipped": False}
        told.append({"ids": sample.token_ids.tolist(), "rollout": None, "number": 0, "text": None, "trained": trained})
        told[-1] |= {"env": "", "ticket": 0, "member": 0}
    about = {"components": ["rl"], "weights": {"exact": True, "from": "here"}, "loss": {}, "samples": told}
    app = build_app(folder)
    app.state.replays = ReplayRunner()
    app.state.replays.results.put(run.path.resolve(), "1", ReplayResult(json.dumps(about).encode(), 1, {}))
    monkeypatch.setattr(recorded_runs, "build_app", lambda *_: app)
    with served(folder) as here:
        page = browser.new_page()
        place = f"tokens/tokens?id={_index(folder, 0, 1)}&stream=ratio&at={len(PROMPT) + 1}"
        _open(page, here, place, ".token-card .token-line")
        card = page.get_by_role("complementary", name="The chosen token")
        expect(card).to_contain_text("Held back. rl: d 0.31 is above trainer.loss.high = 0.2")
        expect(card).to_contain_text(re.compile(r"ratio, replayed\s*1.25"))
        assert page.locator(".token-strip .token-chip.held").count() == 1
        page.close()


def test_tickets_are_filtered_and_one_leads_to_its_tokens(page, folder, address):
    _open(page, address, "tokens/tickets", "tbody tr")
    expect(page.locator("tbody tr")).to_have_count(6)
    page.get_by_label("Dropped because").select_option("zero_advantage")
    expect(page.locator("tbody tr")).to_have_count(1)
    assert "every advantage in the group is zero" in page.locator("tbody tr").inner_text()
    assert "reason=zero_advantage" in page.url
    page.get_by_label("Dropped because").select_option("")
    expect(page.locator("tbody tr")).to_have_count(6)
    page.keyboard.press("/")
    page.keyboard.type("2")
    page.keyboard.press("Enter")
    page.wait_for_selector(".ticket-life")
    names = page.locator(".ticket-life .what b").all_inner_texts()
    assert names == ["drawn", "sampled", "scored", "accepted", "trained", "published", "replayed"]
    page.get_by_role("link", name="Tokens of member 1").click()
    page.wait_for_selector(".token-chip")
    assert f"id={_index(folder, 2, 1)}" in page.url
    page.get_by_role("link", name="Ticket 2").click()
    page.get_by_role("link", name="Ticket 3").click()
    expect(page.locator("h1")).to_have_text("Ticket 3")
    page.get_by_role("link", name="All tickets").click()
    page.locator("tbody tr").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Ticket 4")


def test_a_ticket_drawn_meanwhile_appears_by_itself(page, folder, address):
    _open(page, address, "living/tickets", "tbody tr")
    line = {"number": 6, "env": "reverse-text", "epoch": 0, "draw": 6, "row": 9, "state": "in flight", "since": -1}
    ui.wait_until(page, "performance.getEntriesByType('resource').some((one) => one.name.includes('/api/tickets'))")
    with (folder / "living" / "tickets.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    page.wait_for_selector("tr[data-key='6'] .pill.running")


def test_a_part_of_a_character_names_the_whole_one(page, folder, address):
    index = _index(folder, 0, 0)
    ids = page.context.request.get(f"{address}/api/tokens?run=tokens&id={index}").json()["ids"]
    _open(page, address, f"tokens/tokens?id={index}&at={ids.index(FACE)}", ".token-card .token-line")
    expect(page.get_by_role("complementary", name="The chosen token")).to_contain_text(
        "together with its neighbours “😀”"
    )
