"""The examples of `examples/seeds` that start processes of their own learn, as they are printed (`make smoke`)."""

import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from child_processes import run
from paceline.config import load
from paceline.observe.monitor import read_jsonl
from paceline.runtime import train

pytestmark = pytest.mark.skipif(os.environ.get("PACELINE_NO_SKIPS") != "1", reason="takes half a minute: `make smoke`")
SEEDS = Path(__file__).parents[2] / "examples" / "seeds"


def test_self_play_as_a_library_learns_against_a_server_of_its_own(tmp_path):
    done = run([sys.executable, str(SEEDS / "legos" / "reverse_words.py"), "6"], timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [float(reward) for reward in re.findall(r"(?m)^step +\d+  reward (\S+)", done.stdout)]
    assert len(rewards) == 6
    assert rewards[-1] > rewards[0] + 0.15


def test_grpo_on_ray_learns_with_workers_of_each_role(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = train(load(SEEDS / "async_grpo" / "run.toml").config)
    assert result.outcome.status == "finished", result.outcome.message
    steps = [line for line in result.metrics if line["step"]]
    rewards = [line["reward/sums/mean"] for line in steps]
    assert len(steps) == 20
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.15
    assert all(line["staleness/max"] == 0 for line in steps)
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)  # the logprob workers hold the first weights
    assert steps[-1]["kl"] > 0.01
    root = tmp_path / "runs" / "async-grpo"
    trained = Counter(line["number"] for line in read_jsonl(root / "tickets.jsonl") if line["state"] == "trained")
    assert (len(trained), set(trained.values())) == (20 * 8, {1})
    actors = {f"{role}-{n}" for role in ("engine", "rank", "reference") for n in (0, 1)} | {"worker-0"}
    assert {log.stem for log in (root / ".live").glob("*.log")} == actors
