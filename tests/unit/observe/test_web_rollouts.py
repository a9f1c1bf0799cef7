"""The page of rollouts: its routes, on records that the real keeper wrote."""

import base64
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conversations import Talking, asked, png, rollout, turn
from paceline.observe.analysis.payoff import Payoff
from paceline.observe.web import build_app
from paceline.observe.web.messages import EpisodeTurn, flat_text, message_view, order_turns
from paceline.observe.web.rollouts import common_prefix, split_from_reference
from paceline.observe.web.runs import encode_json
from paceline.runtime.league import leagues
from recorded_runs import Told

GOLD = ("I want nine gold", "I give four gold", "make it six gold", "agreed")


def _then(messages: list, said: str, heard: str) -> list:
    return [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": heard}]


def _bargain(ticket: int) -> list:
    """Seller, buyer, seller, buyer: each hears what the other said."""
    first, second = asked("you begin"), asked(f"seller: {GOLD[0]}")
    seller = [turn(first, GOLD[0]), turn(_then(first, GOLD[0], f"buyer: {GOLD[1]}"), GOLD[2])]
    buyer = [turn(second, GOLD[1]), turn(_then(second, GOLD[1], f"seller: {GOLD[2]}"), GOLD[3])]
    return [
        rollout(ticket, 0, buyer, 0.7, "market", actor="buyer", kind="bargain"),
        rollout(ticket, 0, seller, 0.3, "market", actor="seller", kind="bargain"),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    dice = random.Random(3)
    words = ["Ember", "forest", "castle", "DRAGON", "bridge"]
    told = Talking(folder / "talk")
    for step in range(1, 13):
        for state in ("dropped:stale", "trained", "evaluated"):
            tries = [
                rollout(
                    3 * step + len(state) % 3,
                    member,
                    [turn(asked(dice.choice(words)), " ".join(dice.choices(words, k=dice.randint(1, 9))), step)],
                    dice.choice([0.0, 0.25, 1.0]),
                    dice.choice(["spell", "count"]),
                )
                for member in range(4)
            ]
            told.played(step, state, *tries)
        told.played(step, "trained", rollout(900, 0, [], None, error="too slow (failures.timeout = drop)"))
    told.played(13, "trained", *_bargain(1000)).close()
    Told(folder, "silent").step(2).end()
    return folder


@pytest.fixture
def ask(runs: Path):
    return _asking(runs)


def _asking(folder: Path):
    client = TestClient(build_app(folder), "http://127.0.0.1:8200", raise_server_exceptions=False)

    def get(place: str = "", run: str = "talk", status: int = 200, **params) -> dict:
        answer = client.get(f"/api/rollouts{place}", params={"run": run, **params})
        assert answer.status_code == status, answer.text
        return answer.json()

    return get


QUERIES = [
    ({}, lambda row: True),
    ({"env": "spell"}, lambda row: row["env"] == "spell"),
    ({"env": ["spell", "market"]}, lambda row: row["env"] in ("spell", "market")),
    ({"state": "dropped:"}, lambda row: row["state"].startswith("dropped:")),
    ({"state": "trained", "step_from": 3, "step_to": 5}, lambda r: r["state"] == "trained" and 3 <= r["step"] <= 5),
    ({"reward_from": 0.25, "reward_to": 0.5}, lambda row: row["reward"] in (0.25, 0.3)),
    ({"length_to": 3}, lambda row: row["tokens"] <= 3),
    ({"error": "any"}, lambda row: row["error"] != ""),
    ({"error": "none"}, lambda row: row["error"] == ""),
    ({"error": "timeout"}, lambda row: row["error"] == "timeout"),
    ({"domain": "evaluation"}, lambda row: row["domain"] == "evaluation"),
    ({"actor": "buyer"}, lambda row: row["actor"] == "buyer"),
    ({"ticket": 1000}, lambda row: row["ticket"] == 1000),
]


@pytest.mark.parametrize(("query", "fits"), QUERIES, ids=[" ".join(query) or "all" for query, _ in QUERIES])
def test_a_filter_gives_those_that_fit_and_pages_hold_each_of_them_once(ask, query, fits):
    everything = ask(limit=200)["rows"]
    wanted = [row["index"] for row in everything if fits(row)]
    assert wanted
    pages = [ask(**query, offset=start, limit=7) for start in range(0, len(wanted), 7)]
    assert [row["index"] for page in pages for row in page["rows"]] == wanted
    assert {page["total"] for page in pages} == {len(wanted)}
    assert wanted == sorted(wanted, reverse=True), "the newest come first"


def test_a_search_finds_words_in_any_case_and_quotes_them(ask):
    found = ask(text="dRaGoN", limit=200)
    assert 0 < found["total"] < found["all"]
    assert all("dragon" in row["excerpt"].casefold() for row in found["rows"])
    assert ask(text="nobody said this")["total"] == 0


def test_what_can_be_chosen_comes_with_how_many_there_are(ask):
    counts = ask()["counts"]
    for column, names in counts.items():
        for name, many in names.items():
            wanted = {column: name} if name else {}
            assert not wanted or ask(**wanted)["total"] == many, (column, name)
    assert sum(counts["state"].values()) == ask()["all"]


@pytest.mark.parametrize("query", [{}, {"sort": "reward"}, {"state": "dropped:", "sort": "-tokens"}, {"text": "ember"}])
def test_neighbours_lead_through_the_whole_list_in_its_order(ask, query):
    listed = [row["index"] for row in ask(**query, limit=200)["rows"]]
    walked, here = [], listed[0]
    while here is not None:
        beside = ask("/one", id=here, **query)["beside"]
        assert (beside["place"], beside["total"]) == (len(walked), len(listed))
        assert beside["before"] == (walked[-1] if walked else None)
        walked.append(here)
        here = beside["after"]
    assert walked == listed


def test_a_rollout_that_is_not_in_the_list_has_no_neighbours_there(ask):
    (row, *_) = ask(state="trained")["rows"]
    assert ask("/one", id=row["index"], state="dropped:")["beside"] is None


def test_a_refusal_is_a_sentence(ask):
    assert "there is no rollout 99999" in ask("/one", id=99_999, status=404)["error"]
    assert "there is no rollout" in ask("/group", id=99_999, status=404)["error"]
    assert "there is no rollout" in ask("/episode", id=99_999, status=404)["error"]
    assert "cannot be sorted by `beauty`" in ask(sort="beauty", status=400)["error"]
    for params in ({"step_from": 10**30}, {"ticket": "x"}, {"limit": 10_000}, {"offset": -1}):
        assert ask(status=400, **params)["error"].startswith(f"`{next(iter(params))}`")


def test_a_run_without_rollouts_answers_with_none(ask):
    told = ask(run="silent")
    assert (told["total"], told["rows"], told["kept"], told["league"]) == (0, [], False, False)
    assert ask("/league", run="silent") == {"step": None, "leagues": []}


@pytest.mark.parametrize("file", ["rollouts.data", "rollouts.text", "names.jsonl", "rollouts.index"])
def test_a_record_that_was_cut_anywhere_shows_what_is_left(tmp_path, file):
    told = Talking(tmp_path / "run")
    told.played(1, "trained", *[rollout(n, 0, [turn(asked("why"), f"because {n}")], 0.5) for n in range(20)]).close()
    path = tmp_path / "run" / "record" / file
    for part in (0.9, 0.4, 0.0):
        path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
        found = _asking(tmp_path)(run="run")
        assert found["total"] <= 20
        for row in found["rows"]:
            assert _asking(tmp_path)("/one", run="run", id=row["index"])["row"]["ticket"] == row["ticket"]


# -- messages ---------------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(["role", "content", "tool_calls", "name", "type", "text", "image_url", "function", "url", "x"])


@given(values | st.dictionaries(keys, values | st.lists(st.dictionaries(keys, values, max_size=3), max_size=2)))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_a_message_is_it_can_be_shown(message):
    told = message_view(message)
    assert json.loads(encode_json(told))
    assert all(isinstance(part["text"], str) for part in told["parts"])
    assert isinstance(flat_text(message), str)


def _parts(*sources) -> list[dict]:
    content = [{"type": "image_url", "image_url": {"url": source}} for source in sources]
    return message_view({"role": "user", "content": content})["parts"]


def _data(kind: str, raw: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


@pytest.mark.parametrize(
    "source",
    [
        "https://example.org/cat.png",
        "//example.org/cat.png",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "",
        _data("image/svg+xml", b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"),
        _data("text/html", b"<script>alert(1)</script>"),
        _data("image/png", b"<svg><script>alert(1)</script></svg>"),
        "data:image/png;base64,***",
        "data:image/png,raw",
        _data("image/png", b"\x89PNG\r\n\x1a\n" + bytes(9 << 20)),
    ],
)
def test_an_image_that_is_elsewhere_or_no_picture_is_named_and_has_no_source(source):
    (part,) = _parts(source)
    assert part["kind"] == "unshown"
    assert "source" not in part
    assert len(part["text"]) < 300


def test_a_picture_in_a_message_is_shown_however_apis_write_it():
    data = png()
    raw = data.partition(",")[2]
    for part in (
        {"type": "image_url", "image_url": {"url": data}},
        {"type": "input_image", "image_url": data},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": raw}},
    ):
        (told,) = message_view({"role": "user", "content": [part]})["parts"]
        assert (told["kind"], told["source"]) == ("image", data)


def test_tools_thoughts_and_unknown_parts_are_all_there():
    call = {"id": "call_1", "function": {"name": "look_up", "arguments": '{"word":"a"}'}}
    told = message_view(
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [call], "mood": "good"}
    )
    assert [part["kind"] for part in told["parts"]] == ["thought", "text", "other"]
    assert told["calls"] == [{"name": "look_up", "arguments": '{\n "word": "a"\n}', "id": "call_1"}]
    assert "mood" in told["parts"][-1]["text"]
    assert message_view({"role": "tool", "tool_call_id": "call_1", "content": "b"})["answers"] == "call_1"


def test_every_conversation_of_a_rollout_is_shown_and_says_which_words_were_sampled(tmp_path):
    start = asked("plan a trip")
    onward = _then(start, "to Rome", "and then?")
    aside = asked("a helper is asked something else")
    told = Talking(tmp_path / "run")
    turns = [turn(start, "to Rome", 1), turn(aside, "an aside", 1), turn(onward, "to Naples", 2)]
    told.played(1, "trained", rollout(1, 0, turns, 1.0), rollout(2, 0, [turn(None, "from tokens", 3)], 1.0)).close()
    ask = _asking(tmp_path)
    talks = ask("/one", run="run", id=0)["talks"]["shown"]
    said = [[(m["parts"][0]["text"], m.get("turn", {}).get("number")) for m in talk["messages"]] for talk in talks]
    assert said == [
        [("a helper is asked something else", None), ("an aside", 2)],
        [("plan a trip", None), ("to Rome", 1), ("and then?", None), ("to Naples", 3)],
    ]
    (bare,) = ask("/one", run="run", id=1)["talks"]["shown"]
    assert bare["prompt_tokens"] == 3
    assert bare["messages"][0]["turn"]["versions"] == [3]


def test_a_line_of_the_list_has_the_question_the_expected_answer_and_the_metrics(tmp_path):
    shown = [*_then(asked("an example"), "its answer", "the question"), {"role": "tool", "content": "told"}]
    facts = {"target": "4\n2", "metrics": {"right": 1.0}, "seconds": 2.5}
    turns = [turn(shown, "I think", seconds=0.5), turn(_then(shown, "I think", "and then?"), "42", seconds=1.0)]
    told = Talking(tmp_path / "run")
    told.played(1, "trained", rollout(1, 0, turns, 1.0, **facts), rollout(1, 1, [turn(None, "42")], 0.5)).close()
    ask = _asking(tmp_path)
    bare, line = ask(run="run")["rows"]
    assert (line["question"], line["target"], line["metrics"]) == ("the question", "4 2", {"right": 1.0})
    assert line["excerpt"] == "42"
    assert (bare["question"], bare["target"], bare["metrics"]) == ("", "", {})
    one = ask("/one", run="run", id=0)
    assert (one["target"], one["seconds"], one["turn_seconds"]) == ("4\n2", 2.5, 1.5)
    assert (one["tries"], one["mean_reward"]) == (2, 0.75)
    assert [m["turn"]["seconds"] for m in one["talks"]["shown"][0]["messages"] if "turn" in m] == [0.5, 1.0]


def test_a_run_without_a_record_has_them_from_its_readable_lines(tmp_path):
    run = Told(tmp_path, "run").step(1).end().path
    line = {"step": 1, "env": "words", "ticket": 1, "row": 1, "member": 0, "reward": 1.0, "metrics": {"right": 1.0}}
    line |= {"messages": [*asked("the question"), {"role": "assistant", "content": "42"}], "target": "42"}
    (run / "rollouts.jsonl").write_text(json.dumps(line) + "\n")
    (row,) = _asking(tmp_path)(run="run")["rows"]
    assert (row["question"], row["target"], row["metrics"]) == ("the question", "42", {"right": 1.0})


# -- groups -----------------------------------------------------------------------------------------------------------


@given(st.text(max_size=12), st.text(max_size=12), st.text(max_size=12))
def test_two_texts_part_where_they_first_differ(start, one, other):
    left, right = start + one, start + other
    at = common_prefix(left, right)
    assert left[:at] == right[:at]
    assert at == min(len(left), len(right)) or left[at] != right[at]
    (piece,) = split_from_reference([("assistant", left)], [("assistant", right)])
    assert piece["same"] + piece["rest"] == right


def test_nothing_after_a_parting_counts_as_the_same():
    first = [("assistant", "I look"), ("tool", "42"), ("assistant", "it is 42")]
    other = [("assistant", "I guess"), ("tool", "42"), ("assistant", "it is 42")]
    pieces = split_from_reference(first, other)
    assert [(piece["same"], piece["rest"]) for piece in pieces] == [("I ", "guess"), ("", "42"), ("", "it is 42")]


def test_a_group_holds_the_tries_of_one_actor_and_says_the_prompt_once(tmp_path):
    told = Talking(tmp_path / "run")
    tries = [rollout(5, n, [turn(asked("count"), f"one two {n}")], n / 2) for n in range(3)]
    told.played(1, "trained", *tries, *_bargain(6)).close()
    ask = _asking(tmp_path)
    group = ask("/group", run="run", id=1)
    assert group["begin"] == [{"role": "user", "text": "count"}]
    assert [one["row"]["reward"] for one in group["tries"]] == [0.0, 0.5, 1.0]
    assert [(reply["rows"], reply["reference"]) for reply in group["replies"]] == [
        ([1], True),
        ([0], False),
        ([2], False),
    ]
    assert group["replies"][2]["pieces"] == [{"role": "assistant", "same": "one two ", "rest": "2", "left_out": 0}]
    assert [one["row"]["actor"] for one in ask("/group", run="run", id=3)["tries"]] == ["buyer"]


def test_equal_tries_are_one_reply_and_the_different_one_is_split_where_it_leaves_them(tmp_path):
    told = Talking(tmp_path / "run")
    texts = ["one two 3"] * 3 + ["one two 4"] + ["one two 3"] * 4 + ["none"]
    tries = [rollout(5, n, [turn(asked("count"), text)], n / 2) for n, text in enumerate(texts)]
    broken = rollout(5, 9, [turn(asked("count"), "one two 3")], None, error="too slow")
    told.played(1, "trained", *tries, broken).close()
    ask = _asking(tmp_path)
    for opened, order in ((3, [[3], [8], [9]]), (0, [[3], [8], [9]]), (8, [[8], [3], [9]])):
        first, *others = ask("/group", run="run", id=opened)["replies"]
        assert first["rows"] == [0, 1, 2, 4, 5, 6, 7]
        assert [reply["rows"] for reply in others] == order
        (piece,) = next(reply["pieces"] for reply in others if reply["rows"] == [3])
        assert (piece["same"], piece["rest"]) == ("one two ", "4")
        assert next(reply["error"] for reply in others if reply["rows"] == [9]) == "too slow"


def test_of_a_large_group_the_opened_try_is_always_there(tmp_path):
    told = Talking(tmp_path / "run")
    tries = [rollout(5, n, [turn(asked("count"), str(n == 70))], 0.0) for n in range(80)]
    told.played(1, "trained", *tries).close()
    group = _asking(tmp_path)("/group", run="run", id=70)
    assert (len(group["tries"]), group["total"]) == (64, 80)
    assert [reply["rows"][-1] for reply in group["replies"]] == [62, 70]


def test_solvers_of_one_question_are_compared_with_one_another_alone(tmp_path):
    told = Talking(tmp_path / "run")
    solvers = [
        rollout(7, member, [turn(asked(f"question {member}"), f"answer {n}")], n / 2, actor="solver", parent="proposer")
        for member in range(2)
        for n in range(3)
    ]
    told.played(1, "trained", *solvers).close()
    ask = _asking(tmp_path)
    assert [one["row"]["index"] for one in ask("/group", run="run", id=4)["tries"]] == [3, 4, 5]
    assert ask("/one", run="run", id=4)["tries"] == 3


# -- self-play --------------------------------------------------------------------------------------------------------


def test_an_episode_is_told_in_the_order_in_which_seats_heard_one_another(ask):
    (row, *_) = ask(actor="buyer")["rows"]
    story = ask("/episode", id=row["index"])
    assert [seat["row"]["actor"] for seat in story["seats"]] == ["buyer", "seller"]
    assert [turn["said"]["parts"][0]["text"] for turn in story["line"]] == list(GOLD)
    assert [turn["seat"] for turn in story["line"]] == [1, 0, 1, 0]
    assert [turn["heard"][0]["parts"][0]["text"] for turn in story["line"]][1] == f"seller: {GOLD[0]}"


def test_a_seat_that_is_missing_from_one_game_of_a_group_is_named(tmp_path):
    told = Talking(tmp_path / "run")
    buyer, seller = _bargain(1)
    alone = rollout(1, 1, buyer.turns, 0.2, "market", actor="buyer", kind="bargain")
    told.played(1, "trained", buyer, seller, alone).close()
    ask = _asking(tmp_path)
    assert ask("/episode", run="run", id=2)["absent"] == ["seller"]
    assert ask("/episode", run="run", id=0)["absent"] == []


texts = st.lists(st.lists(st.sampled_from(["a", "b", "a b", "", "c"]), max_size=4), min_size=1, max_size=4)


@given(texts, st.randoms())
def test_every_turn_of_every_seat_comes_once_and_in_its_order(said, dice):
    spoken = [
        [EpisodeTurn(asked(dice.choice(["a", "b", "x: a b", ""])), SimpleNamespace(text=text)) for text in seat]
        for seat in said
    ]
    after = [dice.choice([None, *range(len(said))]) for _ in said]
    order = order_turns(spoken, [None if parent == seat else parent for seat, parent in enumerate(after)])
    for seat, texts in enumerate(said):
        assert [at for who, at in order if who == seat] == list(range(len(texts)))
    assert len(order) == sum(map(len, said))


def test_a_seat_that_another_started_speaks_after_it():
    child, parent = (
        [EpisodeTurn([], SimpleNamespace(text="try"))] * 2,
        [EpisodeTurn([], SimpleNamespace(text="a question"))],
    )
    assert order_turns([child, parent], [1, None]) == [(1, 0), (0, 0), (0, 1)]


def test_the_league_is_what_the_command_says_and_a_broken_one_is_a_sentence(tmp_path):
    run = Told(tmp_path, "run").step(1).end().path
    payoff = Payoff()
    dice = random.Random(1)
    for pair in (("v4", "v0"), ("v4", "v2"), ("v2", "v0")):
        for _ in range(6):
            payoff.add(*pair, dice.choice([0.0, 0.5, 1.0, 1.0]))
    at = run / "checkpoints" / "step-000004"
    at.mkdir(parents=True)
    state = {"step": 4, "leagues": ["duel"], "environments": {"duel": {"league": {"payoff": payoff.state()}}}}
    (at / "state.json").write_text(json.dumps(state))
    ask = _asking(tmp_path)
    told = ask("/league", run="run")
    expected = leagues(run)["duel"].ratings()
    (league,) = told["leagues"]
    assert told["step"] == 4
    assert [(one["player"], one["points"]) for one in league["ratings"]] == [(r.player, r.points) for r in expected]
    players = [rating.player for rating in expected]
    for row, one in enumerate(players):
        assert league["scores"][row][row] is None
        for column, other in enumerate(players):
            assert one == other or league["scores"][row][column] == payoff.score(one, other)
    (at / "state.json").write_text('{"leagues": ["duel"], "environments": {}}')
    assert "cannot be read" in ask("/league", run="run", status=409)["error"]
