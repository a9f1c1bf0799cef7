"""Advisories: each speaks when its defect is planted, none when a run is well; and figures are what they are called."""

import copy
import json
import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from advice_runs import DEFECTS, SPEAKS_OF, Plot, Try, healthy
from paceline.commands import main
from paceline.config import RunConfig
from paceline.config.filters import AdviceConfig, AdvisoryName
from paceline.observe.record import open_run
from paceline.observe.record.advice import RULES, Advisory, advice_window, advise
from paceline.observe.record.advice.learning_rules import UNTRAINED_FLAT_GROUPS, alpha
from paceline.observe.record.advice.measures import SURE, clustered_mean, jackknife, series_mean, trend, wilson_share
from paceline.observe.record.advice.output_rules import r_squared
from paceline.observe.record.advice.prompts import prompt_facts
from paceline.observe.web import build_app
from recorded_runs import torn

COPIES = 300


@cache
def spoken(rule: str, seed: int = 0) -> list[Advisory]:
    return advise(replace(DEFECTS[rule], seed=seed).remembered())


def test_every_advisory_has_a_rule_a_limit_and_a_planted_defect():
    names = set(get_args(AdvisoryName))
    assert [rule.name for rule in RULES] == list(DEFECTS) == list(get_args(AdvisoryName))
    assert names <= AdviceConfig.model_fields.keys()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rule", DEFECTS)
def test_a_planted_defect_is_named_first_and_whatever_else_is_named_follows_from_it(rule, seed):
    found, *rest = spoken(rule, seed)
    assert {(one.follows, one.rule) for one in rest} == {(rule, effect) for effect in EFFECTS_SEEN.get(rule, ())}
    assert (found.rule, found.env) == (rule, SPEAKS_OF.get(rule, "words"))
    assert re.search(r"\d", found.seen), "what was seen has numbers"
    assert re.search(r"±|Wilson", found.basis), "how sure it is has an error"
    assert found.knobs or found.fix
    assert found.steps == (1, 20) or rule == "overfitting"
    assert found.comparison == f"found {found.found:.3g}, limit {found.limit:g}"
    [below] = [one.below for one in RULES if one.name == rule]
    assert found.found < found.limit if below else found.found > found.limit


EFFECTS_SEEN = {"stop_token": ["truncation"], "slow_environment": ["idle"]}
"""What a planted defect brings about beside what it is planted for."""
SOON = ("failures", "strict_grader", "constant_reward", "leaked_answer", "duplicate_rows")
"""Advisories on rows and rewards, of which one step of a large batch shows enough."""


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 20))
def test_nothing_is_said_of_a_run_that_is_well_however_far_it_has_come(seed, steps):
    assert advise(Plot(seed=seed, steps=steps).remembered()) == []


@pytest.mark.parametrize("rule", DEFECTS)
def test_nothing_is_said_before_there_is_enough_to_see(rule):
    steps = 1 if rule in SOON else 3
    assert advise(replace(DEFECTS[rule], steps=steps, notes=()).remembered()) == []


def test_a_task_that_is_done_is_no_defect():
    """Every group flat at the top, entropy gone: so a run ends that learnt all there is."""

    def play(rng: np.random.Generator, step: int, luck: float) -> Try:
        return Try(float(rng.random() < luck + 0.06 * step))

    done = Plot({"words": play}, lambda rng, step: {"entropy": 0.5 * np.exp(-0.4 * step)}, steps=40)
    window = done.remembered()
    groups = window.groups("words")
    assert (groups.high == groups.low).mean() > 0.9
    assert advise(window) == []


@pytest.mark.parametrize(("far", "named"), [(3, ["learning_rate_high"]), (2, [])])
def test_a_policy_that_broke_in_three_steps_is_named_though_its_reward_is_noisy_and_comes_back(far, named):
    def measured(rng: np.random.Generator, step: int) -> dict[str, float]:
        reward = 0.5 if step <= 2 else 0.3 if step <= 10 else 0.3 + 0.02 * step
        distance = 3.0 if 3 <= step < 3 + far else 2e-3
        return {"reward/words/mean": reward, "reward/words/std": 0.4, "sampler_kl": distance}

    found = advise(Plot({"words": healthy}, measured).remembered())
    assert [one.rule for one in found] == named


def test_a_reward_that_never_changes_is_one_even_at_the_top():
    [found] = advise(Plot({"words": lambda rng, step, luck: Try(1.0)}).remembered())
    assert found.rule == "constant_reward"
    assert "exactly 1" in found.seen


def test_the_marker_that_replies_spell_out_is_named_as_the_token_that_should_end_them():
    plot = DEFECTS["stop_token"]
    assert "`eos_token_id`" in advise(plot.remembered())[0].fix

    def spells(rng: np.random.Generator, step: int, luck: float) -> Try:
        return replace(plot.plays["words"](rng, step, luck), said="no<|end|>and on")

    found, *effects = advise(replace(plot, plays={"words": spells}).remembered())
    assert (found.rule, found.knobs) == ("stop_token", [])
    assert "write `<|end|>` and go on" in found.fix
    assert [(one.rule, one.follows, one.knobs) for one in effects] == [("truncation", "stop_token", [])]


def test_draws_that_the_environment_gives_up_on_purpose_are_no_failures():
    def rejects(rng: np.random.Generator, step: int, luck: float) -> Try:
        one = healthy(rng, step, luck)
        return one if rng.random() < 0.6 else replace(one, error="not this one", dropped=True)

    assert advise(Plot({"words": rejects}).remembered()) == []


def test_longer_replies_that_earn_more_are_no_defect():
    def play(rng: np.random.Generator, step: int, luck: float) -> Try:
        return replace(healthy(rng, step, luck), tokens=int(rng.poisson(20 + 3 * step)))

    assert advise(Plot({"words": play}).remembered()) == []


def test_held_out_reward_that_training_catches_up_with_is_no_defect():
    ceiling = Plot(more=lambda rng, step: {} if step % 2 else {"eval/words/reward": 0.95})
    assert advise(ceiling.remembered()) == []


def test_rows_learnt_by_heart_are_named_also_where_both_rewards_stand_still_since():
    def measured(rng: np.random.Generator, step: int) -> dict[str, float]:
        held_out = 0.5 - 0.02 * step if step <= 12 else 0.26 + 0.002 * step
        training = {"reward/words/mean": min(0.95, 0.1 + 0.07 * step)}
        return training if step % 2 else training | {"eval/words/reward": held_out}

    assert "overfitting" in [one.rule for one in advise(Plot(more=measured, steps=40).remembered())]


def test_a_limit_that_is_meant_is_no_truncation():
    """All replies fill one token, as a move in a game; or those that end at the limit earn as well as any."""

    def move(rng: np.random.Generator, step: int, luck: float) -> Try:
        return replace(healthy(rng, step, luck), finish="length", tokens=1)

    def fills(rng: np.random.Generator, step: int, luck: float) -> Try:
        return Try(float(rng.random() < 0.6 + 0.02 * step), finish="length" if rng.random() < 0.3 else "stop")

    window = Plot({"words": move}).remembered()
    config = dict(window.config) | {"sampling": {"max_tokens": 1}}
    assert advise(replace(window, config=config)) == []
    config["sampling"] = {"max_tokens": 4}
    assert [found.rule for found in advise(replace(window, config=config))] == ["truncation"]

    def pays(rng: np.random.Generator, step: int, luck: float) -> Try:
        one = fills(rng, step, luck)
        return replace(one, reward=1.0) if one.finish == "length" else one

    assert "truncation" not in [found.rule for found in advise(Plot({"words": pays}).remembered())]


def test_long_replies_of_a_policy_that_broke_are_not_the_first_cause():
    broken = DEFECTS["learning_rate_high"]

    def play(rng: np.random.Generator, step: int, luck: float) -> Try:
        one = broken.plays["words"](rng, step, luck)
        return one if step <= 2 else replace(one, finish="length", reward=0.0)

    first, second = advise(replace(broken, plays={"words": play}).remembered())[:2]
    assert (first.rule, first.follows) == ("learning_rate_high", "")
    assert (second.rule, second.follows) == ("truncation", "learning_rate_high")


def test_a_prompt_tells_its_answer_only_after_a_word_that_says_so():
    def turns(prompt: str, reply: str) -> list[Any]:
        return [SimpleNamespace(messages=[{"role": "user", "content": prompt}], prompt_ids=[1], text=reply)]

    assert prompt_facts(turns("reverse: abc\nAnswer: cba", "cba")).holds_answer
    assert prompt_facts(turns("the solution is `cba`.", "cba")).holds_answer
    assert not prompt_facts(turns("copy: cba", "cba")).holds_answer
    assert not prompt_facts(turns("answer: cbas", "cba")).holds_answer
    assert prompt_facts(turns("a", "b")).digest != prompt_facts(turns("b", "b")).digest
    assert prompt_facts([]) is None
    assert prompt_facts(turns("reverse: abc\nAnswer: cba", "what?"), "cba").holds_answer
    assert not prompt_facts(turns("reverse: abc\nAnswer: cba", "what?"), "c | x").holds_answer


@pytest.mark.parametrize(
    ("reply", "target", "is_right"),
    [("Yes.", "yes", True), (" YES\n", "no | yes", True), ("a  b", "A B", True), ("yes", "yes!", True),
     ("yes or no", "yes", False), ("-1", "1", False), ("", "", False), ("...", "...", False)],
)  # fmt: skip
def test_a_reply_is_right_but_for_case_white_space_and_punctuation_at_its_ends(reply, target, is_right):
    turn = SimpleNamespace(messages=[{"role": "user", "content": "?"}], prompt_ids=[1], text=reply)
    assert (prompt_facts([turn], target).right is not None) == is_right


def test_a_template_that_is_another_models_or_drops_messages_is_named_before_all_it_brings_about():
    foreign = Plot({"words": lambda rng, step, luck: Try(0.0)}, lambda rng, step: {"mismatch/markers": 2.0})
    first, second = advise(foreign.remembered())[:2]
    assert (first.rule, second.rule, second.follows) == ("chat_template", "constant_reward", "chat_template")
    assert "2 of the template's markers" in first.seen
    [dropped] = advise(Plot(same_tokens=True).remembered())
    assert (dropped.rule, dropped.title) == ("chat_template", "The chat template leaves messages out")


def test_of_self_play_no_flat_reward_is_a_problem():
    """Both sides together earn nothing, however well they play."""
    window = DEFECTS["entropy"].remembered()
    assert [found.rule for found in advise(window)] == ["entropy"]
    config = copy.deepcopy(dict(window.config))
    config["env"][0]["type"] = "arena"
    assert advise(replace(window, config=config)) == []


@pytest.mark.parametrize(
    ("reply", "answer", "words"),
    [("ab", "AB", "but for upper and lower case: expected `AB`, got `ab`"), ("a b", "a  b", "but for white space"),
     ("ab", "ab.", "but for punctuation"), ("ab", "ab", "to the letter, such as `ab`")],
)  # fmt: skip
def test_a_strict_grader_is_shown_by_an_example(reply, answer, words):
    def play(rng: np.random.Generator, step: int, luck: float) -> Try:
        one = healthy(rng, step, luck)
        return replace(one, said=reply if one.metrics["correct"] else "no", reward=0.1 * (1 - one.metrics["correct"]))

    found = advise(Plot({"words": play}, target=answer).remembered())[0]
    assert (found.rule, found.env) == ("strict_grader", "words")
    assert words in found.seen
    assert "`m:f`" in found.fix


def test_a_wait_is_read_from_the_notes_of_engines_and_of_models_that_score():
    engine = "16 requests wait for an engine to come back, one of them for 80 s: no engine is left: http://e"
    [found] = advise(Plot(notes=["something else", engine]).remembered())
    assert (found.rule, found.found) == ("unreachable", 80.0)
    assert "It waited 80 s for an engine: no engine is left" in found.seen
    full = "3 requests are not answered, one of them for 80 s because there is no room: http://e is full"
    assert advise(Plot(notes=[full]).remembered()) == []


def test_at_staleness_0_a_rate_is_too_low_by_what_it_allows():
    still = replace(DEFECTS["learning_rate_low"], more=lambda rng, step: {"staleness/mean": 0.0, "lr": 1e-8})
    window = still.remembered()
    config = dict(window.config) | {"trainer": {"optimizer": {"lr": 1e-8}}}
    [found] = advise(replace(window, config=config))
    assert found.rule == "learning_rate_low"
    assert "2e-07, the sum of the rates" in found.seen
    moves = replace(still, more=lambda rng, step: {"staleness/mean": 0.0, "lr": 1e-6})
    assert advise(moves.remembered()) == []


def test_a_cold_temperature_is_the_first_setting_to_change_where_groups_are_flat():
    window = DEFECTS["flat_groups"].remembered()
    config = dict(window.config) | {"sampling": {"temperature": 0.05}}
    [found] = advise(replace(window, config=config))
    assert (found.rule, found.knobs[0].flag) == ("flat_groups", "--sampling.temperature 1.0")


def test_a_run_whose_groups_are_all_flat_is_told_so_before_its_first_step():
    """It never gets to one: rewards differ from row to row, and never between the tries of one."""
    window = Plot(flat=1.0).remembered()
    [found] = advise(replace(window, columns={}))
    assert found.rule == "flat_groups"
    few = window.rows[: UNTRAINED_FLAT_GROUPS * 2]
    assert advise(replace(window, columns={}, rows=few)) == []


def test_form_that_pays_beside_content_is_no_defect():
    def play(rng: np.random.Generator, step: int, luck: float) -> Try:
        one = healthy(rng, step, luck)
        return replace(one, reward=0.5 * one.metrics["format"] + 0.5 * one.metrics["correct"])

    assert advise(Plot({"words": play}).remembered()) == []


def test_an_algorithm_that_compares_no_group_has_no_flat_ones():
    window = DEFECTS["flat_groups"].remembered()
    config = copy.deepcopy(dict(window.config))
    config["env"][0]["algo"] = {"type": "reward"}
    assert advise(replace(window, config=config)) == []


@pytest.mark.parametrize("rule", DEFECTS)
def test_every_knob_is_a_key_that_the_run_file_takes(rule):
    for knob in spoken(rule)[0].knobs:
        config = DEFECTS[rule].config.model_dump(mode="json", exclude_none=True)
        *path, last = [int(key) if key.isdigit() else key for key in re.findall(r"\w+", knob.key)]
        table: Any = config
        for key in path:
            table = table[key] if isinstance(key, int) else table.setdefault(key, {})
        table[last] = knob.value
        resolved: Any = RunConfig.model_validate(config).model_dump(mode="json")
        for key in [*path, last]:
            resolved = resolved[key]
        assert resolved == knob.value != knob.now
        assert knob.flag.startswith("--" + ".".join(map(str, [*path, last])) + " ")


def test_limits_are_the_run_files():
    window = DEFECTS["truncation"].remembered()
    patient = dict(window.config) | {"advice": {"truncation": 0.5}}
    assert advise(replace(window, config=patient)) == []


# -- from the directory -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("runs")
    for rule in ("truncation", "format", "starving"):
        DEFECTS[rule].written(folder, rule)
    Plot(steps=12).written(folder, "well")
    return folder


@pytest.mark.parametrize("rule", ["truncation", "format", "starving"])
def test_a_directory_tells_what_the_living_run_knew(runs, rule):
    assert advise(advice_window(open_run(runs / rule))) == spoken(rule)


def test_the_rollouts_that_are_named_show_it(runs):
    rollouts = open_run(runs / "truncation").rollouts
    [found] = advise(advice_window(open_run(runs / "truncation")))
    assert {rollouts.row(index).finish for index in found.rollouts} == {"length"}
    rollouts = open_run(runs / "format").rollouts
    [found] = advise(advice_window(open_run(runs / "format")))
    assert all(rollouts.get(index).metrics["format"] == 1.0 == rollouts.row(index).reward for index in found.rollouts)


def test_only_the_last_steps_count(tmp_path):
    """Sixty steps, of which the first forty were cut off."""

    def play(rng: np.random.Generator, step: int, luck: float) -> Try:
        return replace(healthy(rng, step // 3, luck), finish="length" if step <= 40 else "stop")

    run = open_run(Plot({"words": play}, steps=60).written(tmp_path))
    window = advice_window(run)
    assert window.steps == (41, 60)
    assert len(window.rows) == 20 * 40
    assert advise(window) == []


def test_whatever_is_missing_or_torn_there_is_an_answer(runs, tmp_path):
    path = DEFECTS["truncation"].written(tmp_path)
    torn(path / "metrics.jsonl")
    index = path / "record" / "rollouts.index"
    index.write_bytes(index.read_bytes()[:-7])
    assert [found.rule for found in advise(advice_window(open_run(path)))] == ["truncation"]
    (path / "config.toml").write_text('schema_version = 99\nenv = "?"\n')
    assert advise(advice_window(open_run(path))) == []
    (path / "config.toml").write_text("half a li")
    (path / "record" / "schema.json").write_text('{"schema": 77}')
    (path / "metrics.jsonl").unlink()
    assert advise(advice_window(open_run(path))) == []
    answer = TestClient(build_app(tmp_path), base_url="http://127.0.0.1").get("/api/advice", params={"run": "told"})
    assert answer.status_code == 200
    assert answer.json()["silence"] == "no step has trained yet"


def test_the_doctor_prints_them(runs, capsys):
    assert main(["doctor", str(runs / "truncation")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Replies of `words` are cut off" in said
    assert "--sampling.max_tokens 512" in said
    assert main(["doctor", str(runs / "well")]) == 0
    assert "nothing to say about the last 12 steps" in capsys.readouterr().out


def test_the_page_is_told_evidence_and_all_that_was_looked_for(runs):
    client = TestClient(build_app(runs), base_url="http://127.0.0.1")
    told = client.get("/api/advice", params={"run": "starving"}).json()
    assert [rule["name"] for rule in told["rules"]] == [rule.name for rule in RULES]
    assert all(rule["help"] for rule in told["rules"])
    [found] = told["found"]
    assert found["env"] == "essays"
    assert found["knobs"][0]["flag"] == "--trainer.normalise sample"
    assert {"index", "step", "reward", "tokens"} == found["rollouts"][0].keys()
    assert json.dumps(told)


# -- statistics -------------------------------------------------------------------------------------------------------


def wandering(rng: np.random.Generator, count: int, alike: float) -> np.ndarray:
    """Noise in which each value takes after the one before it."""
    noise = rng.standard_normal(count)
    for place in range(1, count):
        noise[place] += alike * noise[place - 1]
    return noise


def test_a_line_is_that_of_least_squares_with_its_error():
    rng = np.random.default_rng(0)
    xs = np.arange(40.0)
    ys = 2 + 0.3 * xs + rng.standard_normal(40)
    found = trend(xs, ys)
    (slope, at), errors = np.polyfit(xs, ys, 1, cov=True)
    assert found.slope == pytest.approx(slope)
    assert found.first == pytest.approx(at)
    assert found.error >= np.sqrt(errors[0, 0]) * 0.999
    assert trend(xs, 5 + 0 * xs).t == 0
    assert trend(xs, 5 + xs).t == np.inf


@pytest.mark.parametrize("alike", [0.0, 0.5])
def test_noise_is_seldom_taken_for_a_trend_though_it_wanders(alike):
    rng = np.random.default_rng(1)
    found = [trend(np.arange(20.0), wandering(rng, 20, alike)) for _ in range(COPIES)]
    assert np.mean([abs(line.t) > SURE for line in found]) < 0.03


@pytest.mark.parametrize("alike", [0.0, 0.5])
def test_a_mean_lies_within_three_errors_of_the_truth(alike):
    rng = np.random.default_rng(2)
    found = [series_mean(7 + wandering(rng, 20, alike)) for _ in range(COPIES)]
    assert np.mean([mean.low <= 7 <= mean.high for mean in found]) > 0.96


def test_tries_of_one_row_count_as_one_where_they_stand_together():
    rng = np.random.default_rng(3)
    groups = np.repeat(np.arange(50), 8)
    apart = clustered_mean((rng.random(400) < 0.3).astype(float), groups)
    together = clustered_mean(np.repeat((rng.random(50) < 0.3).astype(float), 8), groups)
    assert apart.error == pytest.approx(np.sqrt(0.21 / 400), rel=0.3)
    assert together.error == pytest.approx(np.sqrt(0.21 / 50), rel=0.3)


@given(st.integers(0, 60), st.integers(1, 60))
def test_a_share_is_wilsons(hits, more):
    """Its ends are the shares p at which the score (hits/n - p) / sqrt(p (1 - p) / n) is three."""
    count = hits + more
    found = wilson_share(hits, count)
    for end in (found.low, found.high):
        score = (hits / count - end) ** 2 * count
        assert score == pytest.approx(SURE**2 * end * (1 - end), abs=1e-6)


@given(st.integers(0, 1000), st.integers(1, 3))
def test_explained_variance_is_that_of_least_squares(seed, count):
    rng = np.random.default_rng(seed)
    causes = rng.standard_normal((60, count))
    ys = causes @ rng.standard_normal(count) + rng.standard_normal(60)
    columns = np.column_stack([ys, causes])
    rest = ys - causes @ np.linalg.lstsq(causes, ys, rcond=None)[0]
    assert r_squared((columns.T @ columns).ravel(), count) == pytest.approx(1 - rest @ rest / (ys @ ys))


@given(st.integers(0, 1000), st.integers(2, 4))
def test_agreement_is_krippendorffs_alpha_over_all_pairs(seed, judges):
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((15, judges)) + rng.standard_normal((15, 1))
    apart = (scores[:, :, None] - scores[:, None, :]) ** 2
    observed = apart.sum() / (judges - 1) / scores.size
    all_scores = scores.ravel()
    expected = ((all_scores[:, None] - all_scores) ** 2).sum() / (scores.size * (scores.size - 1))
    inner = ((scores - scores.mean(axis=1, keepdims=True)) ** 2).sum()
    sums = np.array([inner, scores.sum(), (scores**2).sum(), len(scores)])
    assert alpha(sums, judges) == pytest.approx(1 - observed / expected)


def test_leaving_groups_out_gives_the_error_of_a_mean():
    values = np.random.default_rng(4).standard_normal(80)
    parts = np.column_stack([values, np.ones(80)])
    found = jackknife(parts, lambda sums: sums[0] / sums[1])
    assert found.value == pytest.approx(values.mean())
    assert found.error == pytest.approx(values.std(ddof=1) / np.sqrt(80))
