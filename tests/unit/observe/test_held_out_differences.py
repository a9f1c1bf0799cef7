"""Held-out results of two runs are paired by row, and equals are told apart in at most one of twenty comparisons."""

import numpy as np
import pytest
from test_web import Client

from paceline.observe.record import open_run
from paceline.observe.record.paired import (
    ALPHA,
    HeldOutDifference,
    held_out_difference,
    held_out_differences,
    verdict,
)
from paceline.observe.record.rollouts import Rollouts
from paceline.observe.web import build_app
from recorded_runs import Told, record_rewards

ROWS, EVALUATIONS, PAIRS = 64, 20, 400


def looks(seed: int) -> list[HeldOutDifference]:
    """All evaluations of two equals. A row that one of them answers better mostly stays so."""
    dice = np.random.default_rng(seed)
    lasting = dice.normal(0, 0.3, ROWS)
    found = []
    for number in range(EVALUATIONS):
        one = dice.normal(0.5, 0.1, ROWS)
        found.append(held_out_difference(number, one, one + lasting + dice.normal(0, 0.1, ROWS), number + 1))
    return found


def test_equals_are_rarely_told_apart_in_any_evaluation():
    told = [any(one.is_real for one in looks(seed)) for seed in range(PAIRS)]
    assert np.mean(told) <= ALPHA + 2 * (ALPHA * (1 - ALPHA) / PAIRS) ** 0.5


def test_a_better_policy_is_found_and_few_rows_say_nothing():
    dice = np.random.default_rng(0)
    one = dice.normal(0.5, 0.1, ROWS)
    found = held_out_difference(10, one, one + dice.normal(0.2, 0.1, ROWS), 5)
    assert found.is_real
    assert found.other > found.one
    assert held_out_difference(10, one[:8], one[:8] + 1.0, 1).radius == np.inf
    assert held_out_difference(10, one, one + (np.arange(ROWS) < 3), 1).radius == np.inf


@pytest.fixture
def runs(tmp_path):
    """Two runs with an evaluation of the untrained policy and two later ones; `large` is better in the end."""
    dice = np.random.default_rng(0)
    for name, better in (("small", 0.0), ("large", 0.4)):
        path = Told(tmp_path, name).step(20).end().path
        record_rewards(path, 0, "evaluated", np.zeros(ROWS))
        for step, factor in ((10, 0.0), (20, 1.0)):
            record_rewards(path, step, "evaluated", np.clip(dice.normal(0.4 + factor * better, 0.1, ROWS), 0, 1))
    return tmp_path


def test_each_evaluation_of_both_is_paired_and_named_by_the_runs(runs):
    found = verdict(open_run(runs / "small"), open_run(runs / "large"))
    assert [(one.step, one.rows, one.is_real) for one in found.held_out] == [(10, ROWS, False), (20, ROWS, True)]
    assert found.held_out_sentence.startswith(
        f"large is ahead on {ROWS} held-out rows at step 20, at 95%: large minus small is +0."
    )
    assert found.sentence == "no draw was made by both"
    swapped = verdict(open_run(runs / "large"), open_run(runs / "small"))
    assert swapped.held_out_sentence.startswith("large is ahead on")
    assert "small minus large is -0." in swapped.held_out_sentence


def test_rows_that_only_one_run_evaluated_are_left_out(runs):
    record_rewards(runs / "small", 30, "evaluated", np.zeros(ROWS))
    record_rewards(runs / "large", 30, "evaluated", np.zeros(ROWS // 2))
    found = verdict(open_run(runs / "small"), open_run(runs / "large"))
    assert (found.held_out[-1].step, found.held_out[-1].rows) == (30, ROWS // 2)


def test_the_draws_of_both_are_called_by_the_names_of_their_runs(runs):
    dice = np.random.default_rng(1)
    for name, level in (("small", 0.2), ("large", 0.8)):
        record_rewards(runs / name, 21, "trained", np.clip(dice.normal(level, 0.1, 120), 0, 1))
    found = verdict(open_run(runs / "small"), open_run(runs / "large"))
    assert found.sentence.startswith(
        "large is ahead in training, at 95% since draw 80 of 120: large minus small is +0."
    )


def test_the_route_of_the_page_has_the_held_out_rows(runs):
    answer = Client(build_app(runs)).get("/api/ab", params={"a": "small", "b": "large"}).json()
    assert [one["is_real"] for one in answer["held_out"]] == [False, True]
    assert "large is ahead on" in answer["held_out_sentence"]
    assert answer["draws"] == 0


def test_the_record_is_read_once_for_any_number_of_evaluations(tmp_path, monkeypatch):
    runs = []
    for name in ("one", "other"):
        path = Told(tmp_path, name).step(30).end().path
        for step in range(1, 31):
            record_rewards(path, step, "evaluated", np.arange(ROWS) % 2)
        runs.append(open_run(path))
    looks, view = [], Rollouts.view
    monkeypatch.setattr(Rollouts, "view", lambda self: looks.append(self) or view(self))
    assert len(held_out_differences(*runs)) == 30
    assert len(looks) < 10
