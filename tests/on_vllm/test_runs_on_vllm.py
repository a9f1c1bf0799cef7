"""Real runs whose policy a live vLLM samples, and a run it teaches."""

import asyncio
import os

import numpy as np
import pytest
from test_vllm import update

from paceline.config import EvalConfig, RecordConfig, RunConfig, inference
from paceline.config.algorithm import OPDConfig
from paceline.config.env import ReverseTextConfig
from paceline.config.model import LoRAConfig, ModelConfig, ModelRef
from paceline.config.trainer import OptimizerConfig, TrainerConfig
from paceline.data import decode
from paceline.model import load_model
from paceline.runtime.session import train

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.environ.get("PACELINE_VLLM") != "1", reason="needs a live vLLM: `make vllm`"),
]
KEY = "PACELINE_TEST_VLLM_KEY"


@pytest.fixture
def fresh(attached, process, monkeypatch):
    """The server holds the weights a run begins with, and its key lies in the environment."""
    monkeypatch.setenv(KEY, process.key)
    asyncio.run(attached().load_weights(update(load_model(ModelConfig()), 0)))


def run(tmp_path, engine, **more):
    """Batches of sixteen rollouts, sampled and trained in turns, all of them kept."""
    settings = {
        "runs": str(tmp_path),
        "batch_size": 16,
        "group_size": 4,
        "steps": 3,
        "staleness": 0,
        "sampling": inference.SamplingConfig(max_tokens=8, temperature=0.8),
        "engine": engine,
        "trainer": TrainerConfig(threads=1, optimizer=OptimizerConfig(lr=3e-3)),
        "eval": EvalConfig(every=0),
        "record": RecordConfig(batches=3),
        "env": [ReverseTextConfig()],
    }
    return train(RunConfig(**settings | more))


def on_vllm(process, **more) -> inference.EngineConfig:
    places = {"max_running": 16, "max_context": 128}
    return inference.EngineConfig(backend="vllm", base_url=process.url, api_key_env=KEY, **places, **more)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4)])
def test_a_run_trains_the_policy_that_vllm_samples(process, fresh, tmp_path, lora):
    done = run(tmp_path, on_vllm(process), model=ModelConfig(lora=lora))
    assert done.outcome.status == "finished", done.error
    assert len(done.metrics) == 3
    batches = [decode(next(done.directory.glob(f"batches/*{step}.*")).read_bytes()) for step in (1, 2, 3)]
    for step, (line, batch) in enumerate(zip(done.metrics, batches, strict=True)):
        assert np.isfinite(line["reward/reverse-text/mean"])
        # Nothing but arithmetic lies between vLLM's log probabilities and the trainer's: each version was really there.
        assert abs(line["mismatch/numerics"]) < 1e-4
        assert {int(v) for sample in batch for v in sample.versions[sample.loss_mask]} == {step}
    assert done.metrics[0]["grad_norm"] > 0
    left = {path.name.split("-")[0] for path in (done.directory / "weights").glob("*")}
    assert left <= {"served"}, "weights that are no longer needed were left"


def test_a_run_that_rides_ahead_keeps_its_requests_through_updates(process, fresh, tmp_path):
    done = run(tmp_path, on_vllm(process, on_swap="recompute"), staleness=2, steps=5)
    assert done.outcome.status == "finished", done.error
    assert max(line["staleness/max"] for line in done.metrics) >= 1
    for step in (3, 4, 5):
        batch = decode(next(done.directory.glob(f"batches/*{step}.*")).read_bytes())
        drawn = {int(v) for sample in batch for v in sample.versions[sample.loss_mask]}
        assert drawn <= set(range(max(0, step - 3), step))
    assert all(np.isfinite(value) for line in done.metrics for value in line.values())


def test_vllm_teaches(process, fresh, tmp_path):
    teacher = ModelRef(name="policy", base_url=f"{process.url}/v1", api_key_env=KEY, concurrency=4)
    own = inference.EngineConfig(max_running=16, max_context=128, threads=1)
    env = [ReverseTextConfig(algo=OPDConfig(teacher=teacher))]
    done = run(tmp_path, own, env=env, sampling=inference.SamplingConfig(max_tokens=8))
    assert done.outcome.status == "finished", done.error
    batch = decode(next(done.directory.glob("batches/*1.*")).read_bytes())
    assert batch
    for sample in batch:  # the teacher is the policy before its first update
        np.testing.assert_allclose(
            sample.teacher_logprobs[sample.loss_mask], sample.logprobs[sample.loss_mask], atol=1e-3
        )
    assert abs(done.metrics[0]["teacher_kl"]) < 1e-3
    assert abs(done.metrics[2]["teacher_kl"]) > abs(done.metrics[0]["teacher_kl"])
