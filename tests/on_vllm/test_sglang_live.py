"""Runs whose policy a live SGLang samples, at the address in PACELINE_SGLANG_URL; it serves the quickstart model."""

import os

import numpy as np
import pytest
from test_runs_on_vllm import run

from paceline.config import inference

URL = os.environ.get("PACELINE_SGLANG_URL", "")
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not URL, reason="needs a live SGLang: see docs/engines.md"),
]


def test_a_run_trains_the_policy_that_sglang_samples(tmp_path):
    engine = inference.EngineConfig(backend="sglang", base_url=URL, max_running=16, max_context=128)
    done = run(tmp_path, engine, staleness=1)
    assert done.outcome.status == "finished", done.error
    assert len(done.metrics) == 3
    assert done.metrics[0]["grad_norm"] > 0
    for line in done.metrics:
        assert np.isfinite(line["reward/reverse-text/mean"])
        assert abs(line.get("mismatch/numerics", 0.0)) < 1e-4, "other weights than the trainer's"
