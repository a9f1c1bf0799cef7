"""A short run with two engines on a Ray that it starts itself. Longer ones, with parts killed, are in `make scale`."""

import math
from collections import Counter
from pathlib import Path

import pytest

from paceline.config import load
from paceline.observe.monitor import read_jsonl
from paceline.runtime import train

pytest.importorskip("ray", reason="needs the extra `ray`")

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
SPREAD = ["--placement=ray", "--cluster.engines=2", "--name=spread", "--checkpoint.every=0"]
SMALL = ["--steps=2", "--batch-size=16", "--eval.every=0", "--engine.max-running=16", "--engine.max-context=64"]


def test_two_engines_on_ray_sample_for_one_trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = train(load(str(QUICKSTART), [*SPREAD, *SMALL]).config)
    assert result.outcome.status == "finished", result.outcome.message
    assert [line["step"] for line in result.metrics if line["step"]] == [1, 2]
    assert all(math.isfinite(line["loss"]) for line in result.metrics if line["step"])
    root = tmp_path / "runs" / "spread"
    ended = Counter(r["number"] for r in read_jsonl(root / "tickets.jsonl") if r["state"] in ("trained", "dropped"))
    assert set(ended.values()) == {1}
    assert {log.name for log in (root / ".live").glob("*.log")} == {"engine-0.log", "engine-1.log", "rank-0.log"}
    assert (root / "export" / "model.safetensors").is_file()
