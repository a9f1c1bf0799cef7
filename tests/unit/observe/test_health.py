"""Verdicts on a run from its metrics: each where its figures are planted, none on a run that is well."""

from typing import Any, get_args

import numpy as np
import pytest
from fastapi.testclient import TestClient

from advice_runs import DEFECTS, Plot
from paceline.observe.analysis.health import UNHEALTHY, RunHealth, Verdict, judge_health, run_health
from paceline.observe.record import open_run
from paceline.observe.report.page import render_report
from paceline.observe.terminal import snapshot
from paceline.observe.web import build_app

STEPS = 20
CONFIG: dict[str, Any] = {"env": [{"type": "reverse-text", "name": "words"}]}


def columns(**changes: list[Any]) -> dict[str, list[Any]]:
    """A run whose reward rises from 0.3 to 0.9; names have `_` for `/`."""
    rng = np.random.default_rng(0)
    learnt = {
        "step": list(range(1, STEPS + 1)),
        "loss": [0.01] * STEPS,
        "batch/rollouts": [128.0] * STEPS,
        "reward/words/mean": (np.linspace(0.3, 0.9, STEPS) + 0.02 * rng.standard_normal(STEPS)).tolist(),
        "reward/words/std": [0.4] * STEPS,
        "metric/words/exact": np.linspace(0.2, 0.8, STEPS).tolist(),
        "eval/words/reward": [None if step % 5 else 0.3 + 0.03 * step for step in range(STEPS)],
        "sampler_kl": [2e-3] * STEPS,
        "staleness/mean": [1.0] * STEPS,
        "drop_ratio": [0.3] * STEPS,
        "wait_time_ratio": [0.2] * STEPS,
    }
    return learnt | changes


def verdict(over: bool = True, config: dict[str, Any] = CONFIG, **changes: list[Any]) -> str:
    return judge_health(columns(**changes), config, over).verdict


FALLEN = [0.35, 0.32, *[0.02] * (STEPS - 2)]
STILL = [0.3] * STEPS
PLANTED: dict[Verdict, dict[str, list[Any]]] = {
    "healthy": {},
    "learning slowly": {"reward/words/mean": STILL, "eval/words/reward": [None] * STEPS},
    "collapsed": {"reward/words/mean": FALLEN},
    "diverged": {"sampler_kl": [2e-3] * 10 + [3.0] * 10},
    "starved": {"drop_ratio": [0.9] * STEPS, "wait_time_ratio": [0.74] * STEPS, "reward/words/mean": STILL},
    "reward-hacked": {"metric/words/exact": np.linspace(0.4, 0.05, STEPS).tolist()},
    "memorising": {"eval/words/reward": [None if step % 4 else 0.3 - 0.005 * step for step in range(STEPS)]},
    "too early to say": {name: column[:3] for name, column in columns().items()},
}


@pytest.mark.parametrize("name", get_args(Verdict))
def test_each_verdict_is_given_where_its_figures_are_planted(name):
    found = judge_health(columns(**PLANTED[name]), CONFIG, over=name != "too early to say")
    assert found.verdict == name
    assert found.is_bad == (name in UNHEALTHY)
    assert found.reason.endswith(".")


def test_a_fall_counts_from_the_best_and_for_held_out_reward_too():
    risen = [*np.linspace(0.3, 0.9, 10).tolist(), *[0.3] * 10]
    assert verdict(**{"reward/words/mean": risen}) == "collapsed"
    assert verdict(**{"eval/words/reward": [0.6, *[None] * 18, 0.1]}) == "collapsed"


def test_a_loss_that_is_not_finite_has_diverged():
    assert verdict(loss=[0.01] * 19 + [float("nan")]) == "diverged"


def test_a_policy_that_was_broken_is_not_healthy_for_learning_anew():
    jumped = [0.002, 7.5, 3.1, 2.0] + [0.03] * 16
    assert verdict(sampler_kl=jumped, **{"staleness/mean": [1.0] * 20}) == "diverged"
    assert verdict(sampler_kl=jumped, **{"staleness/mean": [6.0] * 20}) != "diverged"


def test_a_run_whose_rollouts_never_trained_is_starved_and_one_that_was_stopped_at_once_is_not(tmp_path):
    empty: dict[str, list[Any]] = {name: [] for name in columns()}
    assert verdict(over=True, **empty) == "too early to say"
    assert verdict(over=False, **empty) == "too early to say"
    run = open_run(Plot(steps=4).written(tmp_path))
    assert run_health(run, empty, over=True) == RunHealth(
        "starved", "160 rollouts have ended, and no step has trained."
    )
    assert run_health(run, empty, over=False).verdict == "too early to say"


def test_dropped_groups_of_a_mastered_task_are_no_hunger():
    done = {"reward/words/mean": [0.97] * STEPS, "reward/words/std": [0.1] * STEPS}
    hungry = {"drop_ratio": [0.9] * STEPS, "wait_time_ratio": [0.8] * STEPS}
    assert verdict(**done, **hungry) == "healthy"


def test_the_reward_of_self_play_says_nothing_of_progress():
    arena = {"env": [{"type": "arena", "name": "words"}]}
    still = {"reward/words/mean": STILL, "eval/words/reward": [None] * STEPS}
    assert verdict(config=arena, **still) == "healthy"
    assert verdict(config=arena, **{"reward/words/mean": FALLEN, "eval/words/reward": [None] * STEPS}) == "healthy"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    DEFECTS["learning_rate_high"].written(folder, "broken")
    Plot(steps=40).written(folder, "well")
    return folder


def test_it_stands_in_the_table_on_the_run_in_the_terminal_and_the_report(runs):
    client = TestClient(build_app(runs), base_url="http://127.0.0.1")
    table = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
    assert {name: run["health"]["verdict"] for name, run in table.items()} == {"broken": "collapsed", "well": "healthy"}
    assert table["broken"]["state"] == "finished"
    health = client.get("/api/run", params={"run": "broken"}).json()["health"]
    assert health["verdict"] == "collapsed"
    terminal = snapshot(open_run(runs / "broken"))
    assert "finished  collapsed" in terminal
    assert "collapsed: The reward of `words` fell" in terminal
    report = render_report(open_run(runs / "broken"), 0)
    assert '<span class="state failed">collapsed</span>' in report
    assert '<span class="state finished">finished' not in report


def test_the_advice_page_has_a_value_beside_every_limit_or_the_reason_why_not(runs):
    client = TestClient(build_app(runs), base_url="http://127.0.0.1")
    for run in ("broken", "well"):
        rules = client.get("/api/advice", params={"run": run}).json()["rules"]
        for rule in rules:
            assert rule["limit"] > 0
            for one in rule["measured"]:
                assert (one["value"] is None) == bool(one["missing"]), rule["name"]
        assert sum(one["value"] is not None for rule in rules for one in rule["measured"]) > 15
