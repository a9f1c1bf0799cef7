"""The runs of `examples/seeds/algorithms` train, beside real endpoints of the quickstart model."""

import pytest
from live_server import MODEL, served

from paceline.config import load
from paceline.runtime import train

SMALL = ["--steps=1", "--batch-size=16", "--group-size=4", "--eval.every=0", "--device=cpu", "--trainer.threads=1"]


@pytest.fixture(scope="module")
def endpoint():
    with served("--engine.max_running", "16", "--engine.max_context", "512", "--engine.threads", "1") as server:
        yield server


def trained(endpoint, tmp_path, name: str, place: str, *flags: str) -> list[dict]:
    where = [f"--{place}.name={MODEL}", f"--{place}.base_url={endpoint.url}/v1", f"--runs={tmp_path}"]
    done = train(load(f"seeds/algorithms/{name}", [*SMALL, "--trainer.compile=false", *where, *flags]).config)
    assert done.outcome.status == "finished", done.error
    return done.metrics


def test_rewards_and_a_teacher_train_in_one_batch(endpoint, tmp_path):
    first, second = trained(endpoint, tmp_path, "mixed", "env.by-teacher.algo.teacher", "--steps=2")
    for line in (first, second):
        assert {"reward/by-reward/mean", "reward/by-teacher/mean"} <= line.keys()
        assert line["loss/rl"] != 0
    assert first["teacher_kl"] == pytest.approx(0, abs=1e-4), "the teacher is the policy that was not trained yet"
    assert abs(second["teacher_kl"]) > 2e-4


def test_a_judges_grade_is_part_of_the_reward(endpoint, tmp_path):
    for line in trained(endpoint, tmp_path, "judge", "env.0.judges.0.model", "--filters.zero_advantage=false"):
        task, grade = line["metric/reverse-text/task_reward"], line["metric/reverse-text/judge/helpfulness"]
        assert 0 < grade <= 1
        assert line["reward/reverse-text/mean"] == pytest.approx(task + 0.1 * grade, abs=1e-6)
