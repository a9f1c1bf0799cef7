"""Laws of environments: what built-in tasks ask and pay, and what a user's own may return."""

import asyncio
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import env as config
from paceline.envs import POLICY, EnvError, Environment, Outcome, build_environment
from paceline.envs.base import LARGEST_REWARD
from paceline.orchestrator.episodes import metric_value
from paceline.rollout import Reply

laws = settings(max_examples=40, deadline=None)
BUILT_IN = [config.ReverseTextConfig(), config.ArithmeticConfig()]
LETTERS = st.text("abc", max_size=9)


def pays(environment: Environment, answer: str, said: str) -> tuple[float, float]:
    """Reward and `exact` of a reply."""
    outcome = environment.score({"answer": answer}, Reply(said, truncated=False))
    return outcome.rewards[POLICY], outcome.metrics["exact"]


# --- built in


@pytest.mark.parametrize("settings", BUILT_IN, ids=lambda c: c.type)
def test_splits_are_disjoint_repeatable_and_as_long_as_asked(settings):
    prompts = {}
    for split, count in (("train", settings.train_examples), ("eval", settings.eval_examples)):
        rows = build_environment(settings).examples(split)
        assert rows == build_environment(settings).examples(split)
        prompts[split] = {row["messages"][0]["content"] for row in rows}
        assert len(prompts[split]) == len(rows) == count
    assert prompts["train"].isdisjoint(prompts["eval"])


@pytest.mark.parametrize("settings", BUILT_IN, ids=lambda c: c.type)
def test_every_answer_is_the_right_one(settings):
    environment = build_environment(settings)
    for row in environment.examples("train"):
        (message,) = row["messages"]
        task, _, given_text = message["content"].partition(": ")
        right = given_text[::-1] if task == "reverse" else str(sum(map(int, given_text.split("+"))))
        assert row["answer"] == right
        assert pays(environment, row["answer"], right) == (1.0, 1.0)
        assert pays(environment, row["answer"], "") == (0.0, 0.0)


@laws
@given(LETTERS.filter(bool), LETTERS, st.floats(0, 1))
def test_reverse_text_pays_for_letters_in_place_but_less_than_for_the_word(answer, said, most):
    reward, exact = pays(build_environment(config.ReverseTextConfig(partial_credit=most)), answer, said)
    in_place = sum(i < len(said) and said[i] == letter for i, letter in enumerate(answer))
    longer = max(len(answer), len(said))
    assert exact == (said == answer)
    assert reward == (1.0 if exact else pytest.approx(most * in_place / longer))
    assert 0 <= reward <= 1
    assert exact or reward < 1
    assert exact or reward <= most


@laws
@given(st.integers(0, 198), st.integers(-5, 205), st.sampled_from(["", " ", "\n", "0", ".", " 1"]))
def test_arithmetic_pays_the_exact_sum_and_nothing_else(answer, said, after):
    reward, exact = pays(build_environment(config.ArithmeticConfig()), str(answer), f"{said}{after}")
    assert reward == exact == float(f"{said}{after}".strip() == str(answer))


# --- outcomes


@laws
@given(st.floats() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(width=32).map(np.float32))
def test_a_reward_is_a_finite_number(reward):
    if not isinstance(reward, str) and abs(reward) <= LARGEST_REWARD:
        assert Outcome.solo(reward).rewards == {POLICY: reward}
        return
    with pytest.raises(
        EnvError, match=r"the reward of seat `judge` is .*: (a reward must be a finite|return a) number"
    ):
        Outcome({POLICY: 0.0, "judge": reward})


def test_metrics_travel_with_the_outcome():
    assert Outcome.solo(0.5, exact=1.0, tries=2) == Outcome({"policy": 0.5}, {"exact": 1.0, "tries": 2})


# --- a user's own

CODE = """
from paceline import Environment, Outcome

async def give(row, seat):
    return row["value"]

async def spread(row, seat):
    return Outcome.solo(0.25, row=float(row["n"]))

async def scaled(row, seat, scale):
    return scale * seat["score"]

def plain(row, seat):
    return 1.0

class Maze(Environment):
    def __init__(self, size):
        self.size = size

    def examples(self, split):
        return [{"n": n} for n in range(self.size)]

    async def play(self, example, seats):
        return Outcome.solo(example["n"])

class Stranger:
    pass

NUMBER = 3
"""


@pytest.fixture(scope="module")
def custom(tmp_path_factory):
    """Builds what a name in a user's file stands for, over three training rows."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "game.py").write_text(CODE)
    (folder / "rows.jsonl").write_text('{"n": 0}\n{"n": 1}\n{"n": 2}\n')

    def build(name: str, dataset: str | None = f"{folder}/rows.jsonl", **kwargs) -> Environment:
        path = f"{folder}/game.py:{name}"
        return build_environment(config.CustomEnvConfig(name="mine", import_path=path, dataset=dataset, kwargs=kwargs))

    return build


def play(environment: Environment, row: dict | None = None, seat=None) -> Outcome | None:
    return asyncio.run(environment.play(row or {"n": 1}, {POLICY: seat}))


@laws
@given(st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.floats(-9, 9).map(np.float64))
def test_a_functions_number_or_bool_is_the_reward(custom, value):
    outcome = play(custom("give"), {"value": value})
    assert outcome == Outcome.solo(float(value))
    assert type(outcome.rewards[POLICY]) is float


def test_a_function_plays_the_rows_of_its_dataset(custom):
    environment = custom("spread")
    assert list(environment.examples("train")) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert environment.examples("eval") == []
    assert play(environment, {"n": 2}) == Outcome.solo(0.25, row=2.0)
    assert play(custom("scaled", scale=3), seat={"score": 0.25}) == Outcome.solo(0.75)


def test_none_drops_the_episode(custom):
    assert play(custom("give"), {"value": None}) is None


@pytest.mark.parametrize("value", ["1.0", [1.0], {"reward": 1}])
def test_what_is_no_reward_is_a_sentence(custom, value):
    with pytest.raises(EnvError, match=r"game.py:give returned .*: return a number, a bool, or None"):
        play(custom("give"), {"value": value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_function_may_not_return_infinity(custom, value):
    with pytest.raises(EnvError, match="must be a finite number"):
        play(custom("give"), {"value": value})


class Sly:
    def __float__(self):
        raise ValueError("not today")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (1e308, "1e+308: a reward must be a finite number of at most 1e+18"),
        (np.float64(-1e300), "a reward must be a finite number of at most"),
        (10**400, "a reward must be one finite number (int too large to convert to float)"),
        pytest.param(10**5000, "something of type int (Exceeds the limit", id="5000 digits"),
        (np.ones(3), "a reward must be one finite number ("),
        (Sly(), "a reward must be one finite number (not today)"),
        (np.str_("1"), "return a number"),
        (b"1", "return a number"),
        (1j, "return a number"),
    ],
)
def test_a_reward_of_any_kind_and_size_is_used_or_refused_with_its_value(custom, value, problem):
    with pytest.raises(EnvError, match=re.escape(problem)):
        play(custom("give"), {"value": value})
    with pytest.raises(EnvError, match=re.escape(problem)):
        Outcome.solo(value)
    assert metric_value(value) is None or math.isnan(metric_value(value))


@pytest.mark.parametrize("value", [True, 3, np.float32(0.5), np.bool_(True), np.int64(2), -1e18])
def test_rewards_that_are_numbers_are_used(custom, value):
    assert play(custom("give"), {"value": value}).rewards == {POLICY: float(value)}


def test_a_class_brings_its_own_rows(custom):
    environment = custom("Maze", dataset=None, size=4)
    assert [row["n"] for row in environment.examples("train")] == [0, 1, 2, 3]
    assert play(environment, {"n": 3}) == Outcome.solo(3)


@pytest.mark.parametrize(
    ("name", "dataset", "sentence"),
    [
        ("plain", "rows.jsonl", "game.py:plain: an environment function must be `async def rollout"),
        ("give", None, "environment `mine`: a function needs rows, name them with `dataset`"),
        ("Stranger", None, "game.py:Stranger: neither a paceline.Environment class nor an async function"),
        ("NUMBER", None, "game.py:NUMBER: neither a paceline.Environment class nor an async function"),
    ],
)
def test_what_cannot_be_played_is_refused_with_a_sentence(custom, name, dataset, sentence):
    with pytest.raises(EnvError, match=sentence):
        custom(name, dataset=dataset)
