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


@pytest.mark.parametrize(
    ("name", "place", "shown"),
    [
        ("mixed", "env.by-teacher.algo.teacher", {"loss/rl", "ref_kl"}),
        ("judge", "env.0.judges.0.model", {"metric/reverse-text/judge/helpfulness", "metric/reverse-text/task_reward"}),
    ],
)
def test_the_example_trains(endpoint, tmp_path, name, place, shown):
    where = [f"--{place}.name={MODEL}", f"--{place}.base_url={endpoint.url}/v1", f"--runs={tmp_path}"]
    done = train(load(f"seeds/algorithms/{name}", [*SMALL, "--trainer.compile=false", *where]).config)
    assert done.outcome.status == "finished", done.error
    assert shown <= done.metrics[-1].keys()
